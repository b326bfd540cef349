"""Where a process of a run writes: a file of its own in the run's folder, whatever writes there.

Standard output and error are that file from the process's first moment on, so that native crashes
and the processes it starts are in it as well. It also holds the stacks of a process that hangs.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import threading
from pathlib import Path

LOGS_FOLDER = "logs"
"""Of a run's folder."""
START_LINE = "=== a process starts ===\n"
"""What a process writes into its log first: only what follows the last one is of this process."""
STACK_SIGNAL = signal.SIGUSR1
"""A process that has it writes the Python stacks of its threads, whatever it is doing."""
MAX_BYTES = 64 << 20
"""A longer log is moved aside, in the place of the one that was before."""
TAIL_BYTES = 1 << 20
LAST_LINES = 5
_LOOK_S = 10.0


def trainer_log(folder: Path, rank: int) -> Path:
    """Of a trainer rank, in a run's folder of logs."""
    return folder / f"trainer-rank-{rank}.log"


def engine_log(folder: Path, index: int) -> Path:
    """Of a rollout engine and vLLM's processes."""
    return folder / f"engine-{index}.log"


def redirect_output(path: Path, *, max_bytes: int = MAX_BYTES, look_s: float = _LOOK_S) -> None:
    """Let this process and those it starts write to a file from here on, which stays short.

    Args:
        path: of the log; what others wrote there before stays.
        max_bytes: how long it may get.
        look_s: seconds between two looks at that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # to append lets several processes share it, also when it is cut
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, START_LINE.encode())
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    write_stacks_on_signal()
    cutter = threading.Thread(target=_keep_short, args=(path, max_bytes, look_s), daemon=True)
    cutter.start()


def write_stacks_on_signal() -> None:
    """Let this process answer STACK_SIGNAL; the handler needs neither interpreter nor lock."""
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)


def _keep_short(path: Path, max_bytes: int, look_s: float) -> None:
    wait = threading.Event().wait
    while not wait(look_s):
        try:
            if os.fstat(1).st_size > max_bytes:
                # all who write hold this file: only its contents can be moved. What is written in
                # between is lost
                shutil.copyfile(path, path.with_name(f"{path.name}.1"))
                os.ftruncate(1, 0)
        except OSError:
            # a full disk: the log may get longer meanwhile
            continue


def read_tail(path: Path) -> str:
    """The end of a log, of its last process only; a missing one is empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(START_LINE)[2]


def quoted(path: Path | None) -> str:
    """Where a process's log is and its last lines, to be put behind a message."""
    if path is None:
        return ""
    lines = [line.rstrip() for line in read_tail(path).splitlines() if line.strip()]
    ending = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
    return f" (log: {path})" + (f"; it ends in{ending}" if ending else "")
