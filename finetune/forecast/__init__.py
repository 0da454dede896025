"""Forecast: where the bytes will be, found by running the real step on fake tensors."""
