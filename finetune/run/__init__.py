"""Run: the run directory, the training process, its supervisor, and how to start, stop and resume a run."""
