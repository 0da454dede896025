"""Sweeps: runs of one recipe, compared on the same held-out rows."""
