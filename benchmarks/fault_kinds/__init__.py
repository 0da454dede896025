"""What `benchmarks/faults.py` does to a run, a module for each kind."""
