"""Mini-batches and micro-batches of one rank: partition, packing, off-policy weights."""
