"""Views: HTML from values. Views start no processes; only `scores` reads files."""
