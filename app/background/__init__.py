"""Queue and starter of runs, commands on results."""
