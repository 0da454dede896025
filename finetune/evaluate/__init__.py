"""Evaluate base and tuned model on the same rows."""
