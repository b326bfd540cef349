"""Prompts, the built-in arithmetic task, and the packed batch."""
