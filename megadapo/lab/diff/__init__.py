"""Comparison of two runs: the first step, phase and place in which they part."""
