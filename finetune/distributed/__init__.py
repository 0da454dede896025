"""Distributed: training with several ranks, on one machine or several."""
