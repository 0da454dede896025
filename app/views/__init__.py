"""Views: HTML from values. Views read no files and start no processes."""
