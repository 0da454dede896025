"""Starts: what waits to be started, and the process that starts it."""
