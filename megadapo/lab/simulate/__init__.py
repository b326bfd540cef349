"""The product's own sampler, and its rivals' rules, on a virtual clock: which mode fills a batch
soonest, what it throws away, and what it does to lengths and staleness."""
