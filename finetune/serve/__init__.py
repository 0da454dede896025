"""Serve a run's base model and adapters to programs that speak OpenAI's interface."""
