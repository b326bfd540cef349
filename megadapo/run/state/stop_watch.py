"""Requests to stop by the file `stop` in a run's folder.

Any process on any machine can write it, such as one that hears that its machine will end.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from megadapo.cluster.watch.guard import start_time
from megadapo.run.state.lease import age_s
from megadapo.run.state.stop import StopSignal

STOP_FILE = "stop"
RESTART = "restart"
"""Beginning of a stop file after which a supervisor starts the run again."""
LOOK_S = 2.0
"""Seconds between two looks."""
WRITING_S = 0.2
"""Seconds in which the text of a new file appears."""
MAX_TEXT = 200


class StopWatch:
    """A thread that requests a stop. Use as a context manager."""

    def __init__(self, folder: Path, stop: StopSignal) -> None:
        self._folder = folder
        self._stop = stop
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):
            # a file older than this process asked a driver before it
            if age_s(self._folder / STOP_FILE) > _process_age_s():
                take_stop_file(self._folder)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        # a folder that does not answer must not keep the run
        self._thread.join(timeout=LOOK_S)

    def _watch(self) -> None:
        while not self._closed.is_set():
            text = take_stop_file(self._folder)
            if text is not None:
                reason = f"the file {self._folder / STOP_FILE}" + (f": {text}" if text else "")
                self._stop.request(reason, stays_stopped=not restarts_after(text))
            self._closed.wait(LOOK_S)


def _process_age_s() -> float:
    ticks = int(start_time(os.getpid()) or 0)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def restarts_after(text: str) -> bool:
    """Return whether a supervisor starts a run again that a stop file with this text stopped."""
    return text.startswith(RESTART)


def take_stop_file(folder: Path) -> str | None:
    """Remove the stop file of a run; return its text, or None if there is no file to remove."""
    path = folder / STOP_FILE
    with suppress(OSError):
        if path.stat().st_size == 0:
            time.sleep(WRITING_S)
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        return " ".join(text.split())[:MAX_TEXT]
    return None
