"""Whether a process still runs."""

from __future__ import annotations

from megadapo.cluster.watch.guard import start_time


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return start_time(pid) is not None
