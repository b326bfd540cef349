"""Ray, its placement groups, and the processes that run in them."""
