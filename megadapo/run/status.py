"""`status.json`: where a run stands, for other programs; replaced whole, so never read half."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from megadapo.errors import DataError, RunInterrupted

STATUS_FILE = "status.json"
_LOGGER = logging.getLogger("megadapo.run")


@dataclass(frozen=True, kw_only=True)
class Status:
    """One run's place; all times are ISO 8601 with their zone."""

    state: Literal["running", "finished", "stopped", "failed"] = "running"
    """What its driver said last: one that was killed says "running" still."""
    reason: str | None = None
    phase: str = "start"
    step: int = 0
    """Last completed step."""
    num_steps: int
    checkpoint_step: int = 0
    """Step a new driver goes on from; 0: from the model's own weights."""
    resumed_from: int = 0
    """Step this driver went on from."""
    restarts: int = 0
    """Drivers before this one."""
    host: str
    pid: int
    started: str
    updated: str
    """When the phase or the step last changed."""


class StatusFile:
    """Keeps the status file of a run that is driven by this process."""

    def __init__(self, folder: Path, *, num_steps: int) -> None:
        """Say that a driver has begun."""
        self._path = folder / STATUS_FILE
        try:
            restarts = read_status(folder).restarts + 1
        except DataError:
            restarts = 0
        self._status = Status(
            num_steps=num_steps,
            restarts=restarts,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_now(),
            updated=_now(),
        )
        self._write()

    def resumed(self, step: int) -> None:
        """Say after which step the driver goes on."""
        self._set(replace(self._status, step=step, checkpoint_step=step, resumed_from=step))

    def phase(self, name: str) -> None:
        self._set(replace(self._status, phase=name))

    def completed(self, step: int) -> None:
        self._set(replace(self._status, step=step))

    def saved(self, step: int) -> None:
        self._set(replace(self._status, checkpoint_step=step))

    def end(self, error: BaseException | None) -> str:
        """Write down how the run ended, and return it as a line for the log."""
        status = self._status
        if error is None:
            done = status.step >= status.num_steps
            status = replace(status, state="finished" if done else "stopped")
        else:
            text = " ".join(str(error).split())
            status = replace(
                status,
                state="stopped" if isinstance(error, RunInterrupted) else "failed",
                reason=f"{type(error).__name__}: {text}" if text else type(error).__name__,
            )
        self._set(status)
        return self._closing_line()

    def _closing_line(self) -> str:
        status, folder = self._status, self._path.parent
        line = f"end: state={status.state} step={status.step}/{status.num_steps}"
        line += f" checkpoint={status.checkpoint_step}"
        if status.reason is not None:
            line += f" reason={status.reason!r}"
        return line if status.state == "finished" else f'{line} go_on="megadapo train {folder}"'

    def _set(self, status: Status) -> None:
        if status != self._status:
            self._status = replace(status, updated=_now())
            self._write()

    def _write(self) -> None:
        part = self._path.with_name(f"{STATUS_FILE}.part")
        try:
            part.write_text(json.dumps(asdict(self._status), indent=2) + "\n", encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            # what others read of a run must not end it
            _LOGGER.warning("%s was not written: %s", self._path, error.strerror)


def read_status(folder: Path) -> Status:
    """Return the status of the run in a folder.

    Raises:
        DataError: there is none, or it is not a status.
    """
    path = folder / STATUS_FILE
    try:
        return Status(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {STATUS_FILE}: it is not the folder of a run") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
