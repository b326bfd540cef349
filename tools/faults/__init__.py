"""Faults for supervised runs; tools/kills.py uses them."""
