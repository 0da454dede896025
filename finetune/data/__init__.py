"""Rows in, tokens with labels out."""
