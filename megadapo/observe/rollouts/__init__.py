"""Saved rollouts: their format, files, and how a terminal shows them."""
