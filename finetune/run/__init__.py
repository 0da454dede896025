"""Run: a directory, one training process, and the events it writes."""
