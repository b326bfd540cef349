"""Exports of a run's checkpoints beside training, each in a child process.

Training never waits for an export and never fails with one. A checkpoint is not deleted while a
child reads it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megadapo.cluster.watch.guard import Guard, kill_after_this_process
from megadapo.run.state.checkpoint_store import step_folders, step_of
from megadapo.weights.disk.export import PARTIAL
from megadapo.weights.disk.files import remove_folder

EXPORTS = "exports"
"""Name of the exports' folder in the run's folder."""
LOGS = "logs"
LOWEST_PRIORITY = 19
LAST_S = 3600.0
"""Seconds that a finished run waits for its exports; its processes hold GPUs meanwhile."""
END_S = 10.0
"""Seconds that an export has to end before it is killed."""
_ENVIRONMENT = {
    # tokenizer and configuration are on this machine, so the Hub is not needed
    "HF_HUB_OFFLINE": "1",
    # opening a GPU would take memory from engine or trainer
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    guard: Guard
    """Kills the child if this process is killed."""
    log: Path


class BackgroundExports:
    """The exports of one run, in `exports/step-N` of its folder. Use as a context manager."""

    def __init__(self, run_folder: Path, show: Callable[[str], None]) -> None:
        """`show`: shows a message to the user."""
        self.folder = run_folder / EXPORTS
        self._logs = run_folder / LOGS
        self._show = show
        self._children: dict[int, _Child] = {}
        self._num_written = 0
        self._num_failed = 0

    @property
    def steps(self) -> frozenset[int]:
        """Steps whose checkpoints are being exported."""
        return frozenset(self._children)

    def tidy(self, step: int) -> None:
        """Delete incomplete exports, and rename those after `step`, which the run will repeat."""
        for path in self.folder.glob(f"step-*{PARTIAL}"):
            remove_folder(path)
        for path in step_folders(self.folder):
            if step_of(path) > step:
                path.rename(path.with_name(f"aside-{path.name}-{uuid.uuid4().hex[:8]}"))

    def start(self, checkpoint: Path, step: int) -> None:
        """Start to export a committed checkpoint unless its export exists."""
        destination = self.folder / f"step-{step}"
        if destination.exists():
            return
        log = self._logs / f"export-step-{step}.log"
        try:
            self.folder.mkdir(exist_ok=True)
            self._logs.mkdir(exist_ok=True)
            process = _start_child(checkpoint, destination, log)
        except OSError as error:
            self._failed(step, f"it could not be started: {error}")
            return
        self._children[step] = _Child(process, kill_after_this_process([process.pid]), log)

    def collect(self) -> None:
        """Count the exports that have ended, and report failures."""
        for step, child in list(self._children.items()):
            if child.process.poll() is not None:
                self._close(step)

    def wait(self) -> None:
        """Wait for all running exports, for `LAST_S`, then show how many were written."""
        until = time.monotonic() + LAST_S
        for step, child in list(self._children.items()):
            if _ends(child.process, max(0.0, until - time.monotonic())):
                self._close(step)
        for step in self._children:
            self._failed(step, f"it did not end in {LAST_S:g} s: repeat it with megadapo export")
        self.end()
        if self._num_written or self._num_failed:
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._show(f"exports: {self._num_written} in {self.folder}{failed}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Terminate running exports; a resumed run starts them again."""
        for child in self._children.values():
            child.process.terminate()
        for child in self._children.values():
            if not _ends(child.process, END_S):
                child.process.kill()
                # a disk that does not answer may keep even a killed process
                _ends(child.process, END_S)
            child.guard.dismiss()
        self._children.clear()

    def _close(self, step: int) -> None:
        child = self._children.pop(step)
        child.guard.dismiss()
        if child.process.returncode == 0:
            self._num_written += 1
            return
        code = child.process.returncode
        for partial in self.folder.glob(f"step-{step}{PARTIAL}*"):
            # of a killed child; others remove it themselves
            shutil.rmtree(partial, ignore_errors=True)
        output = child.log.read_text(encoding="utf-8", errors="replace").strip()
        last_line = (output.splitlines() or ["without output"])[-1]
        self._failed(step, f"exit code {code}, {last_line} ({child.log})")

    def _failed(self, step: int, why: str) -> None:
        self._num_failed += 1
        self._show(f"the export of step {step} failed, training continues: {why}")


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Return whether a process ends in time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=limit_s)
    return process.poll() is not None


def _start_child(checkpoint: Path, destination: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megadapo.cli", "export", checkpoint, destination],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
    return process
