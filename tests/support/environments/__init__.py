"""Environments of tests, which run in worker processes."""
