"""Checkpoints of the trainer's state: what each rank owns, and how it is written and read."""
