"""A weight update: what goes where, what carries it, and both of its ends."""
