"""What a run will take before it is started: memory of every kind of rank, time, weight traffic."""
