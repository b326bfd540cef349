"""Descendants and memory of processes on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util

import psutil

MIB = 1 << 20


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on; empty if it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def private_bytes(*pids: int) -> int:
    """Return the private (unshared) memory of processes in total; used to detect leaks.

    Mapped files and shared memory are not counted; a process that has ended counts as 0.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = psutil.Process(pid).memory_info()
            total += memory.rss - memory.shared
    return total


def return_freed_memory() -> None:
    """Let the C library return the free pages of the heap to the system."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    # only the GNU C library has this function
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
