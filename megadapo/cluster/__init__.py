"""Ray, placement groups, and the end of every process that was started."""
