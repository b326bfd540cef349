"""Checks of this machine and of every node of a cluster."""
