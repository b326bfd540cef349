"""Prompts, the built-in arithmetic tasks, and the packed batch."""
