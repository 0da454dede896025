"""Distributed: many processes that train together, on one machine or several."""
