"""Kills the processes that this process would leave behind if it were killed.

vLLM's engine core outlives a killed parent and keeps the GPU's memory, and Ray outlives a killed
driver. So a process starts this file as a separate program, which waits until a pipe to the process
is closed. It needs only the standard library, to start fast and stay small.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Literal

MARK = "MEGADAPO_ENGINE_MARK"
"""Environment variable that marks the processes of one engine, or of Ray."""
GRACE_S = 3.0
"""Seconds that listed processes have to end by themselves."""
SWEEP_PAUSE_S = 0.05
MAX_SWEEPS = 600
"""Limit on waiting for a process in uninterruptible sleep: half a minute in all."""
_DISMISS = b"stand down"


class Guard:
    """A guard process, which acts when this process ends for any reason."""

    def __init__(self, kind: Literal["mark", "pids"], targets: Sequence[str]) -> None:
        """`targets`: one mark and folders to remove, or `PID:START_TIME` of each process."""
        starter = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, kind, *targets],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        starter.wait()
        assert starter.stdin is not None
        self._pipe = starter.stdin

    def dismiss(self) -> None:
        """End the guard process without killing anything; safe to call again."""
        if not self._pipe.closed:
            with contextlib.suppress(BrokenPipeError), self._pipe as pipe:
                pipe.write(_DISMISS)


def kill_after_this_process(pids: Iterable[int]) -> Guard:
    """Kill the given processes if this process is killed; an orderly exit kills nothing."""
    guard = Guard("pids", [f"{pid}:{start_time(pid)}" for pid in pids])
    atexit.register(guard.dismiss)
    return guard


def mark_and_guard(mark: str, folder: str) -> Guard:
    """Mark all processes that this one starts from now on; kill them, and remove a folder, when
    this one ends."""
    os.environ.pop(MARK, None)
    guard = Guard("mark", [mark, folder])
    os.environ[MARK] = mark
    return guard


def marked_processes(mark: str) -> list[int]:
    """Return this user's processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # the process has ended, or belongs to another user
        with contextlib.suppress(OSError):
            if wanted in _read(f"/proc/{name}/environ").split(b"\0"):
                found.append(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kill all marked processes but this one, wait, and remove their shared memory."""
    leftovers: set[str] = set()
    num_empty = 0
    for _ in range(MAX_SWEEPS):
        found = [pid for pid in marked_processes(mark) if pid != os.getpid()]
        num_empty = 0 if found else num_empty + 1
        # a process that is just starting shows no environment for a moment
        if num_empty == 2:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                # blocks of multiprocessing.SharedMemory that the process has mapped
                maps = _read(f"/proc/{pid}/maps").decode()
                leftovers |= set(re.findall(r"/dev/shm/psm_\w+", maps))
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)
    for path in leftovers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Tells a process from a later one with the same pid.
    """
    with contextlib.suppress(OSError):
        state, *fields = _read(f"/proc/{pid}/stat").decode().rpartition(")")[2].split()
        return fields[18] if state not in "ZX" else None
    return None


def send_signal(processes: Iterable[tuple[int, str | None]], number: signal.Signals) -> None:
    """Signal those processes, given by pid and start time, that still run."""
    for pid, started in processes:
        if started is not None and start_time(pid) == started:
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _main(kind: str, *targets: str) -> None:
    # Ray kills the children of an actor that ends, but not its grandchildren
    if os.fork():
        os._exit(0)
    if sys.stdin.buffer.read() == _DISMISS:
        return
    if kind == "mark":
        mark, *folders = targets
        kill_marked(mark)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return
    time.sleep(GRACE_S)
    listed = [target.partition(":") for target in targets]
    send_signal([(int(pid), started) for pid, _, started in listed], signal.SIGKILL)


if __name__ == "__main__":
    _main(*sys.argv[1:])
