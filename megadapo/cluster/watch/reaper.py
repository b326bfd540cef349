"""Kills what an engine leaves behind when its process is killed.

vLLM's engine core outlives a killed parent and keeps the GPU's memory. So every engine starts
this file as a small process of its own that waits for the parent's end of a pipe to close, and
then kills every process that carries the engine's mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import IO

MARK = "MEGADAPO_ENGINE_MARK"
SWEEP_PAUSE_S = 0.05
MAX_SWEEPS = 600
"""A process in uninterruptible sleep is waited for, for half a minute in all."""


def start_reaper(mark: str) -> IO[bytes]:
    """Watch over the calling process; processes it starts from now on inherit the mark.

    Returns the end of the pipe to hold on to: the watch ends when it is closed.
    """
    os.environ.pop(MARK, None)
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    reaper.wait()
    os.environ[MARK] = mark
    assert reaper.stdin is not None
    return reaper.stdin


def marked_processes(mark: str) -> list[int]:
    """Return this user's processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # gone meanwhile, or another user's
        with contextlib.suppress(OSError):
            if wanted in _read(f"/proc/{name}/environ").split(b"\0"):
                found.append(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kill them all, wait until they are gone, and remove the shared memory they leave behind."""
    leftovers: set[str] = set()
    num_empty = 0
    for _ in range(MAX_SWEEPS):
        found = [pid for pid in marked_processes(mark) if pid != os.getpid()]
        num_empty = 0 if found else num_empty + 1
        # a process that is just being started has no environment to be seen for a moment
        if num_empty == 2:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                leftovers |= _shared_memory(pid)
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)
    for path in leftovers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _shared_memory(pid: int) -> set[str]:
    """Paths of the multiprocessing.SharedMemory blocks that a process has mapped."""
    return set(re.findall(r"/dev/shm/psm_\w+", _read(f"/proc/{pid}/maps").decode()))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    # Ray kills the children of an actor that ends; a grandchild is left to do its work
    if os.fork():
        os._exit(0)
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
