"""Sets the clock of one machine wrong, for all that its Python programs read of it.

A machine of namespaces has the wall clock of the machine below. Python imports this file at its
start where its folder is in PYTHONPATH. CLOCK_AHEAD_S is how far the clock is ahead.
"""

import os
import time


def _set_ahead(seconds):
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + seconds
    time.time_ns = lambda: true_time_ns() + int(seconds * 1e9)


_set_ahead(float(os.environ.get("CLOCK_AHEAD_S", "0")))
