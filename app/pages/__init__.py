"""The pages, one module each: what it shows is rebuilt from files, what it does is what the command line does."""
