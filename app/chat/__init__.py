"""Chat: conversations with a run's model, in a process of their own."""
