"""The trainer: the only room that imports megatron.core."""
