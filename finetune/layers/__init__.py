"""What a model's layers do otherwise: lean, offloaded, recomputed, with routed experts. Nothing here knows a recipe's file."""
