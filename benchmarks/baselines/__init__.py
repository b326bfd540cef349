"""Benchmarks against installed baselines: same inputs, same run, checked against fp64."""
