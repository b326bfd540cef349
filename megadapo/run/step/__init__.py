"""One step of a run: its batch and update, its metrics, and everything written about it."""
