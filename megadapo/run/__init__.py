"""A run: its folder, its clock, its checkpoints, requests to stop it, and its running parts."""
