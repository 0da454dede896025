"""Changes to a model's layers, independent of recipes."""
