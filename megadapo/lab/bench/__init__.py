"""Benchmarks against baselines that are installed: same inputs, same run, checked against fp64."""
