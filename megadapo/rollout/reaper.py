"""Kills what an engine leaves behind when its process is killed.

vLLM's engine core outlives a killed parent and keeps the GPU's memory. So every engine starts
this file as a small process of its own that waits for the parent's end of a pipe to close, and
then kills every process that carries the engine's mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

MARK = "MEGADAPO_ENGINE_MARK"
SWEEP_PAUSE_S = 0.05
MAX_SWEEPS = 600
"""A process in uninterruptible sleep is waited for, for half a minute in all."""


def start_reaper(mark: str) -> subprocess.Popen[bytes]:
    """Watch over the calling process; processes it starts from now on inherit the mark."""
    os.environ.pop(MARK, None)
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[MARK] = mark
    return reaper


def marked_processes(mark: str) -> list[int]:
    """Return the ids of this user's processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            # gone meanwhile, or another user's
            continue
        if wanted in variables:
            found.append(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kill them all, those included that a dying one has just started."""
    for _ in range(MAX_SWEEPS):
        found = [pid for pid in marked_processes(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
