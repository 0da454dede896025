"""The pages, one module each. A page is rebuilt from files, and its buttons do the same as the command line."""
