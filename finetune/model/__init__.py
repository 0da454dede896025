"""Model: builds base model and adapters for training and forecast, and applies the memory techniques."""
