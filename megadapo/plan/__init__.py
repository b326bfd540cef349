"""Memory, time and weight traffic of a run before its start."""
