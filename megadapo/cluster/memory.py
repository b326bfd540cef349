"""Main memory that a process has for itself, by which one that grows is told.

Mapped files, libraries' code among them, and memory that processes share do not count. The kernel
keeps this sum at hand: reading it takes less than 0.1 ms at any size.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
from pathlib import Path

MIB = 1 << 20


def private_bytes(*pids: int) -> int:
    """Anonymous resident memory of the processes together; nothing of one that has ended."""
    return sum(map(_anonymous, pids))


def return_freed_memory() -> None:
    """Let the C library give back the pages between what is in use."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    # others than the GNU one have no such function
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _anonymous(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
