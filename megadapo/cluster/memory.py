"""How processes that compute on the CPU keep freed memory."""

from __future__ import annotations

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
"""Environment of the GNU C library's allocator, read when a process starts.

Without it every large activation is a mapping of its own, given back when it is freed: tens of
thousands of page faults a step, each of which clears a page, while other threads wait for the
address space.
"""
