"""Metrics, progress, saved rollouts, report and plot of a run; facts about the machine."""
