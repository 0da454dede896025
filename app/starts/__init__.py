"""The queue of runs, and the process that starts them."""
