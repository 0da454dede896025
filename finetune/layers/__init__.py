"""Changes to a model's layers: lean, offloaded, recomputed, with routed experts. Nothing here knows a recipe's file."""
