"""Export: the tuned model for other programs."""
