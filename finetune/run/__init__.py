"""Run directory, training process, supervisor, and control of runs."""
