"""Whether a process still runs, and a wait for what another process or thread does."""

import time
from collections.abc import Callable

from megadapo.cluster.watch.guard import start_time


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return start_time(pid) is not None


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = 60.0, message: str = ""
) -> None:
    """Wait until a condition holds, or fail with the message."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message or f"not within {timeout_s:g} s"
        time.sleep(0.01)
