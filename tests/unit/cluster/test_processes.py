"""Private memory and descendants of processes."""

import mmap
import os
import subprocess

from megadapo.cluster.processes import MIB, descendants, private_bytes, return_freed_memory


def test_private_memory_excludes_shared_memory() -> None:
    """A weight bucket or a mapped library would look like a leak."""
    before = private_bytes(os.getpid())
    own = bytearray(os.urandom(64 * MIB))
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared[:] = bytes(own)
        grown = private_bytes(os.getpid()) - before
    assert 60 * MIB < grown < 80 * MIB


def test_ended_processes_count_as_zero() -> None:
    """An engine is several processes, and one may die while they are measured."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert private_bytes(os.getpid(), child.pid) > private_bytes(child.pid) > 0
        assert child.pid in descendants(os.getpid())
        child.kill()
    assert private_bytes(child.pid) == 0
    assert descendants(child.pid) == []


def test_heap_fragments_are_returned() -> None:
    """The C library returns only the end of the heap by default."""
    small = [bytes(32 << 10) for _ in range(4096)]
    kept = small[::64]
    before = private_bytes(os.getpid())
    del small
    return_freed_memory()
    assert before - private_bytes(os.getpid()) > 100 * MIB
    assert len(kept) == 64
