"""Dynamic sampling on the driver: prompts out, scored groups back, the batch, evaluation."""
