"""Forecast: memory of a training run, part by part, from a dry run of the real step on fake tensors."""
