"""Base models and adapters for training and forecast, and their memory techniques."""
