"""Events of a run, which a command of the user receives: `run.on_event`.

The command gets one JSON object on standard input; no value of the run is in its command line. A
thread starts one command at a time, so neither the loop nor a rank waits for it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Literal

from megadapo.observe.metrics.records import plain_numbers
from megadapo.observe.tables import printable
from megadapo.run.state.status import Status

Event = Literal["start", "step", "save", "restart", "oracle", "end"]

COMMAND_S = 10.0
"""Seconds after which a command is killed."""
FINISH_S = 30.0
"""Most seconds by which events that still wait delay the end of a run."""
MAX_WAITING = 16
"""Number of events that may wait for a slow command; the oldest are dropped."""
MAX_OUTPUT = 500
"""Most bytes of a failed command's output in the warning."""
SUPERVISOR = "MEGADAPO_SUPERVISOR"
"""Environment variable with the process of a driver's supervisor."""


def is_supervised() -> bool:
    """Return whether a supervisor that is alive has started this process."""
    return os.environ.get(SUPERVISOR) == str(os.getppid())


class EventHook:
    """Calls a command for each event. Its failures are one warning."""

    def __init__(self, command: str | None, folder: Path, *, warn: Callable[[str], None]) -> None:
        """`command`: words as in a shell, started without one; None for no calls."""
        self._words = [] if command is None else shlex.split(command)
        self._folder = folder.absolute()
        self._warn = warn
        self._warned = False
        self._changed = threading.Condition()
        self._waiting: list[tuple[Event, bytes]] = []
        self._thread: threading.Thread | None = None
        self._finish_by: float | None = None
        """Time at which `finish` stops waiting; None unless it waits."""

    def send(
        self,
        event: Event,
        status: Status | None,
        *,
        reason: str | None = None,
        metrics: Mapping[str, int | float | None] | None = None,
    ) -> None:
        """Call the command soon, after earlier events; return at once.

        Among the steps that wait for a slow command only the newest stays.
        """
        if not self._words:
            return
        content = {
            "event": event,
            "folder": str(self._folder),
            "reason": reason,
            "status": None if status is None else asdict(status),
            "metrics": None if metrics is None else plain_numbers(metrics),
        }
        text = json.dumps(content, allow_nan=False).encode() + b"\n"
        with self._changed:
            waiting = [call for call in self._waiting if not call[0] == event == "step"]
            self._waiting = [*waiting, (event, text)][-MAX_WAITING:]
            if self._thread is None:
                self._thread = threading.Thread(target=self._call_all, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the command has been called for all events, for at most `FINISH_S`."""
        with self._changed:
            thread, self._finish_by = self._thread, time.monotonic() + FINISH_S
            self._changed.notify_all()
        if thread is not None:
            # a moment more, because the thread itself keeps the time
            thread.join(FINISH_S + 1.0)
        self._finish_by = None

    def _call_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._finish_by is not None)
                if not self._waiting:
                    self._thread = None
                    return
                event, text = self._waiting.pop(0)
                limit_s = COMMAND_S
                if self._finish_by is not None:
                    limit_s = min(limit_s, self._finish_by - time.monotonic())
            try:
                with tempfile.TemporaryFile() as output:
                    problem = self._call(text, limit_s, output)
            except OSError as error:
                problem = str(error)
            if problem is not None and not self._warned:
                self._warned = True
                self._warn(
                    f"run.on_event failed at the event {event!r}; further failures are not shown: "
                    f"{printable(problem)}"
                )

    def _call(self, text: bytes, limit_s: float, output: BinaryIO) -> str | None:
        """Run the command once; return why it failed, or None."""
        if limit_s <= 0:
            return f"it was too slow to be called within {FINISH_S:g} s of the run's end"
        command = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the run; the group is killed as a whole
            start_new_session=True,
        )
        try:
            command.communicate(text, timeout=limit_s)
        except subprocess.TimeoutExpired:
            problem = f"it was killed after {round(limit_s, 1):g} s"
        else:
            problem = f"exit code {command.returncode}" if command.returncode else ""
        finally:
            # kills what the command left in the background too
            with suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            command.wait()
        if not problem:
            return None
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT))
        said = " ".join(output.read().decode(errors="replace").split())
        return f"{problem}: {said}" if said else problem
