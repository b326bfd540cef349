"""The state of a run on disk: checkpoints, resume, lease, status, stop."""
