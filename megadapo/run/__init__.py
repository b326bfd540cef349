"""A run: its folder, its clock, its checkpoints, how it is asked to stop, and its running parts."""
