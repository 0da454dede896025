"""Sweeps: runs of one recipe that differ in a few settings, compared on the same held-out rows while they train."""
