"""Runs the trainings of an ablation, each in a process of its own, some side by side.

A training that fails is named and ends no other. When the ablation is stopped it stops what is
under way as a person would, so that the same command goes on there.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megadapo.cluster.watch.guard import Guard, kill_after_this_process
from megadapo.errors import RunInterruptedError
from megadapo.lab.ablation.plan import PlannedRun
from megadapo.run.state.stop import StopSignal

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A training that did not reach its last step."""

    run: PlannedRun
    exit_code: int
    """Negative: the number of the signal that ended it."""
    message: str

    def __str__(self) -> str:
        return f"{self.run.name}: exit code {self.exit_code}, {self.message} (log: {self.run.log})"


@dataclass(frozen=True)
class _Child:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    guard: Guard
    """Kills the child if this process is killed."""
    since: float
    log_start: int
    """Bytes of the log that earlier processes of the run wrote."""


class Runner:
    """Trains planned runs, at most `jobs` at a time."""

    def __init__(self, *, jobs: int, say: Callable[[str], None]) -> None:
        """`say`: shows a line about a run that begins or has ended."""
        self._jobs = jobs
        self._say = say
        self._children: list[_Child] = []
        self._failures: list[Failure] = []

    def train(self, runs: Iterable[PlannedRun]) -> list[Failure]:
        """Train all that are not finished and return those that failed.

        Raises:
            RunInterruptedError: it was asked to stop; so were the trainings under way.
        """
        waiting = deque(run for run in runs if run.standing() != "finished")
        stop = StopSignal()
        stop.install()
        try:
            with stop.interruptible():
                self._train_all(waiting)
        except RunInterruptedError as stopped:
            raise RunInterruptedError(
                f"{stopped}; the same command goes on with the runs that are not finished"
            ) from None
        finally:
            self._end_children()
            stop.uninstall()
        return self._failures

    def _train_all(self, waiting: deque[PlannedRun]) -> None:
        while waiting or self._children:
            while waiting and len(self._children) < self._jobs:
                self._start(waiting.popleft())
            time.sleep(POLL_S)
            for child in [child for child in self._children if child.process.poll() is not None]:
                self._close(child)

    def _start(self, run: PlannedRun) -> None:
        goes_on = "goes on" if run.standing() == "begun" else "begins"
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a terminal's Ctrl-C would reach it a second time, which means: end at once
                start_new_session=True,
            )
        guard = kill_after_this_process([process.pid])
        self._children.append(_Child(run, process, guard, time.monotonic(), log_start))
        self._say(f"{run.name} {goes_on}: {run.folder}")

    def _close(self, child: _Child) -> None:
        self._children.remove(child)
        child.guard.stand_down()
        took, code = time.monotonic() - child.since, child.process.returncode
        if code == 0:
            self._say(f"{child.run.name} finished after {took:.0f} s")
            return
        failure = Failure(run=child.run, exit_code=code, message=_last_words(child))
        self._failures.append(failure)
        self._say(f"{failure}")

    def _end_children(self) -> None:
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            child.process.wait()
            child.guard.stand_down()
        self._children.clear()


def _last_words(child: _Child) -> str:
    """The error that the process ended with, else the last line it wrote."""
    said = child.run.log.read_bytes()[child.log_start :].decode(errors="replace")
    lines = said.strip().splitlines()
    errors = [line for line in lines if line.startswith("megadapo: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("megadapo: ")
