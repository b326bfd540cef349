"""Exports of checkpoints to Hugging Face folders, with a model card."""
