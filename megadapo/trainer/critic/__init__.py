"""The critic: its model, its loss, and one step of its training."""
