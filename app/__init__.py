"""The web page: pick model and data, see that it fits, start, watch, come back. It reads files; runs are other processes."""
