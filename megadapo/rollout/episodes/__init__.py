"""Episodes of environments: what engines ask and are answered, and the journal of what was done."""
