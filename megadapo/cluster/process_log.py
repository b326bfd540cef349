"""The log file of each process of a run, in the run's folder.

Standard output and error go to that file from the start of the process. So native crashes and child
processes are in it too, and the stacks of a process that hangs.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megadapo.errors import InfraError

LOGS_FOLDER = "logs"
START_LINE = "=== a process starts ===\n"
"""First line that a process writes; it separates the processes that share a log."""
STACK_SIGNAL = signal.SIGUSR1
"""Signal on which a process writes the Python stacks of its threads."""
QUIT_SIGNAL = signal.SIGQUIT
"""Signal on which the driver does; STACK_SIGNAL asks it for a checkpoint."""
MAX_BYTES = 64 << 20
"""Size above which a log is moved to FILE.1, which is overwritten."""
TAIL_BYTES = 1 << 20
LAST_LINES = 5
_CHECK_S = 10.0


def trainer_log(folder: Path, rank: int) -> Path:
    """Return the log of a trainer rank."""
    return folder / f"trainer-rank-{rank}.log"


def engine_log(folder: Path, index: int) -> Path:
    """Return the log of a rollout engine and of vLLM's processes."""
    return folder / f"engine-{index}.log"


def driver_log(run_folder: Path) -> Path:
    """Return the file of the driver's stacks; its messages are in log.txt."""
    return run_folder / LOGS_FOLDER / "driver.log"


def redirect_output(path: Path, *, max_bytes: int = MAX_BYTES, check_s: float = _CHECK_S) -> None:
    """Append the output of this process and its children to a log, and limit the log's size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # appending lets several processes share the file, also after it is truncated
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, START_LINE.encode())
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    write_stacks_on_signal()
    limiter = threading.Thread(target=_limit_size, args=(path, max_bytes, check_s), daemon=True)
    limiter.start()


def write_stacks_on_signal() -> None:
    """Write stacks on STACK_SIGNAL; the handler needs neither the interpreter nor a lock."""
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)


@contextmanager
def stacks_on_quit(path: Path) -> Iterator[None]:
    """Append the Python stacks of this process to a file on each QUIT_SIGNAL within this block."""
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise InfraError(f"{path} cannot be written: {error.strerror}") from error
    faulthandler.register(QUIT_SIGNAL, file=file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(QUIT_SIGNAL)
        # a file server that fails now must not hide an error of the block
        with suppress(OSError):
            file.close()


def _limit_size(path: Path, max_bytes: int, check_s: float) -> None:
    wait = threading.Event().wait
    while not wait(check_s):
        try:
            if os.fstat(1).st_size > max_bytes:
                # other processes have this file open, so only its contents can be moved; lines
                # written between the two calls are lost
                shutil.copyfile(path, path.with_name(f"{path.name}.1"))
                os.ftruncate(1, 0)
        except OSError:
            # full disk: try again at the next check
            continue


def read_tail(path: Path) -> str:
    """Return the end of a log, of its last process only; empty if the log is missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(START_LINE)[2]


def quote_log(path: Path) -> str:
    """Return the path of a log and its last lines, as the end of a message."""
    lines = [line.rstrip() for line in read_tail(path).splitlines() if line.strip()]
    ending = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
    return f" (log: {path})" + (f"; it ends in{ending}" if ending else "")
