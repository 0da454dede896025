"""Forecast of a run's memory by part, from a dry run of the real step on fake tensors."""
