"""Kills what Ray would leave behind when the driver is killed.

Ray's server and node manager end with the driver, but two agents of the node manager first try for
a minute to tell the server, which is gone, about it. So the driver starts this file as a small
process of its own, which waits for the driver's end and then kills those that Ray started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

POLL_S = 0.5
GRACE_S = 3.0
"""What ends in an orderly way gets that long for it."""


def kill_after_this_process(pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Once this process has been killed, kill the others that are still there.

    A process that ends in an orderly way has ended them itself. Returns the process that watches,
    to be ended when none of the others is left.
    """
    known = [f"{pid}:{start_time(pid)}" for pid in (os.getpid(), *pids)]
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, *known],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_end, watcher)
    return watcher


def _end(watcher: subprocess.Popen[bytes]) -> None:
    watcher.kill()
    watcher.wait()


def descendants(pid: int) -> list[int]:
    """Children, children's children and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks; None where it has ended. Tells a number's new owner
    from the old one."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def send(processes: Iterable[tuple[int, str | None]], number: signal.Signals) -> None:
    """Signal those that are still there of some processes, by number and start time."""
    for pid, its_start in processes:
        if its_start is not None and start_time(pid) == its_start:
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _wait_and_kill(known: list[tuple[int, str]]) -> None:
    (driver, started), *others = known
    while start_time(driver) == started:
        time.sleep(POLL_S)
    time.sleep(GRACE_S)
    send(others, signal.SIGKILL)


if __name__ == "__main__":
    words = (word.partition(":") for word in sys.argv[1:])
    _wait_and_kill([(int(pid), its_start) for pid, _, its_start in words])
