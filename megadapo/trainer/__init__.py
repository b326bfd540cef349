"""The trainer: the only package that imports megatron.core."""
