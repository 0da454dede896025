"""Evaluate: does the tuned model do what the base could not?"""
