"""Views: HTML from values and from the files of a run. Views start no processes."""
