"""One update on one rank: the schedule's passes, the optimizer, and the measured sums."""
