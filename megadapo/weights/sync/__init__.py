"""Weight updates: plan, buckets, transports, and the code at both ends."""
