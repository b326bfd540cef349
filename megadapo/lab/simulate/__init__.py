"""The product's sampler and its baselines on a virtual clock: speed, waste, bias and staleness."""
