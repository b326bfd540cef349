"""Where the time of a step and of each kernel goes, and how kernels compile."""
