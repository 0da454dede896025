"""Export: the result as a model that other programs load."""
