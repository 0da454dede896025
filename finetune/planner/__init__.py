"""Plan a run before it starts."""
