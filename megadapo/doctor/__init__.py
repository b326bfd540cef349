"""Checks of this machine, of every node of a cluster, and of a chat template."""
