"""Ablations: runs that differ by a few keys, over several seeds, and their comparison."""
