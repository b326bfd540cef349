"""Runs that differ by a few keys, over several seeds, and what the differences come to."""
