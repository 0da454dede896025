"""Model: the one builder of base model and adapters, and the memory techniques."""
