"""Runner of an ablation's trainings: one process each, some side by side.

A failed training does not end the others. An interrupted ablation stops its trainings with the
signal that a user would send, so that the same command can resume them.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megadapo.cluster.watch.guard import Guard, kill_after_this_process
from megadapo.errors import RunInterruptedError
from megadapo.lab.ablation.rows import RowRun
from megadapo.run.state.stop import StopSignal

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RunFailure:
    """A training that ended before its last step."""

    run: RowRun
    exit_code: int
    """Exit code; a negative one is the number of the signal that killed it."""
    message: str

    def __str__(self) -> str:
        return f"{self.run.name}: exit code {self.exit_code}, {self.message} (log: {self.run.log})"


@dataclass(frozen=True)
class _ChildRun:
    run: RowRun
    process: subprocess.Popen[bytes]
    guard: Guard
    """Guard that kills the child if this process is killed."""
    start: float
    log_start: int
    """Bytes of the log from earlier processes of the run."""


def train_runs(
    runs: Iterable[RowRun], *, jobs: int, show: Callable[[str], None]
) -> list[RunFailure]:
    """Train all unfinished runs, at most `jobs` at a time, and return the failed ones.

    Args:
        show: prints a line when a run starts or ends.

    Raises:
        RunInterruptedError: a stop was requested; the trainings were stopped too.
    """
    waiting = deque(run for run in runs if run.state() != "finished")
    children: list[_ChildRun] = []
    failures: list[RunFailure] = []
    stop = StopSignal()
    stop.install()
    try:
        with stop.interruptible():
            while waiting or children:
                while waiting and len(children) < jobs:
                    run = waiting.popleft()
                    verb = "resumes" if run.state() == "started" else "starts"
                    children.append(_start(run))
                    show(f"{run.name} {verb}: {run.folder}")
                time.sleep(POLL_S)
                for child in [child for child in children if child.process.poll() is not None]:
                    children.remove(child)
                    failures += _close(child, show)
    except RunInterruptedError as stopped:
        raise RunInterruptedError(
            f"{stopped}; the same command continues with the unfinished runs"
        ) from None
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            child.process.wait()
            child.guard.dismiss()
        stop.uninstall()
    return failures


def _start(run: RowRun) -> _ChildRun:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # in this session a terminal's Ctrl-C would be its second signal: end at once
            start_new_session=True,
        )
    guard = kill_after_this_process([process.pid])
    return _ChildRun(run, process, guard, time.monotonic(), log_start)


def _close(child: _ChildRun, show: Callable[[str], None]) -> list[RunFailure]:
    """Show how a training ended, and return its failure if it has one."""
    child.guard.dismiss()
    seconds, code = time.monotonic() - child.start, child.process.returncode
    if code == 0:
        show(f"{child.run.name} finished after {seconds:.0f} s")
        return []
    output = child.run.log.read_bytes()[child.log_start :].decode(errors="replace")
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("megadapo: ")]
    # the error of the command if it printed one, or else its last line
    message = (errors or lines or ["no output"])[-1].removeprefix("megadapo: ")
    failure = RunFailure(run=child.run, exit_code=code, message=message)
    show(f"{failure}")
    return [failure]
