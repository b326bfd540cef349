"""Profiles of steps and kernels, traces of runs, and the compile report."""
