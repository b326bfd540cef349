"""Weight updates that carry only changed elements."""
