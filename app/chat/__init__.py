"""Chat with a run's base and tuned model."""
