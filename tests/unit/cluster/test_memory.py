"""The memory that a process has for itself: what tells that it grows."""

from __future__ import annotations

import mmap
import os
import subprocess

from megadapo.cluster.memory import MIB, private_bytes, return_freed_memory


def test_what_a_process_takes_counts_and_what_it_shares_does_not() -> None:
    """A weight bucket or a mapped library would look like something that is kept."""
    before = private_bytes(os.getpid())
    own = bytearray(os.urandom(64 * MIB))
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared[:] = bytes(own)
        grown = private_bytes(os.getpid()) - before
    assert 60 * MIB < grown < 80 * MIB


def test_processes_are_added_up_and_one_that_has_ended_has_none() -> None:
    """An engine is several processes, and one of them may die while it is looked at."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert private_bytes(os.getpid(), child.pid) > private_bytes(child.pid) > 0
        child.kill()
    assert private_bytes(child.pid) == 0


def test_pages_between_what_is_in_use_are_given_back() -> None:
    """Gaps in the heap would be kept for good: the C library only cuts its end off."""
    small = [bytes(32 << 10) for _ in range(4096)]
    kept = small[::64]
    before = private_bytes(os.getpid())
    del small
    return_freed_memory()
    assert before - private_bytes(os.getpid()) > 100 * MIB
    assert len(kept) == 64
