"""Sets the clock of one machine wrong, for all that its Python programs read of it.

A machine of namespaces has the wall clock of the machine below. Python imports this file at its
start where its folder is in PYTHONPATH. CLOCK_AHEAD_S is how far the clock is ahead, or
CLOCK_AHEAD_FILE is a file of eight bytes that has this number, which may change at any time.
"""

import mmap
import os
import struct
import time


def _set_ahead(seconds):
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + seconds()
    time.time_ns = lambda: true_time_ns() + int(seconds() * 1e9)


if "CLOCK_AHEAD_FILE" in os.environ:
    with open(os.environ["CLOCK_AHEAD_FILE"], "rb") as _file:
        _values = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _set_ahead(lambda: struct.unpack("d", _values)[0])
else:
    _ahead_s = float(os.environ.get("CLOCK_AHEAD_S", "0"))
    _set_ahead(lambda: _ahead_s)
