"""Environments that answer a response turn by turn, and the processes that they run in."""
