"""Web: the server, who may talk to it, and what it accepts."""
