"""Detection of processes that hang or are left behind."""
