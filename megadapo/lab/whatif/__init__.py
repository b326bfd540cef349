"""A comparison of objectives on a batch that a run has saved, by the run's own trainer."""
