"""The queue of runs with the process that starts them, and commands on results as detached processes."""
