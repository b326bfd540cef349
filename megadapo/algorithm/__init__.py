"""The algorithm as pure maths: no I/O, no processes, no distributed."""
