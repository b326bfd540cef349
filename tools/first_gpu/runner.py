"""Runs a part within its time, watches the memory of its run, and ends what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from parts import Part

from megadapo.errors import DataError
from megadapo.run.state.status import read_status

MARK = "MEGADAPO_FIRST_GPU"
"""Variable in the environment of every process of a part."""
GRACE_S = 20.0
"""Time between a request to end and a kill."""
SAMPLE_S = 0.25


@dataclass(kw_only=True)
class Outcome:
    """The result of one part."""

    part: Part
    result: str = "passed"
    """One of passed, failed and skipped."""
    reason: str = ""
    seconds: float = 0.0
    memory: list[tuple[float, str, float]] = field(default_factory=list)
    """Seconds since the start, phase of the run, and MiB in use."""

    def most_in(self, phase: str) -> float | None:
        """Return the most MiB in use in a phase."""
        return max((used for _, at, used in self.memory if at == phase), default=None)


def run_part(part: Part, log: Path, *, limit_s: float, on_gpu: bool) -> Outcome:
    """Run the part's command, at most for `limit_s`, with its output in `log`."""
    outcome = Outcome(part=part)
    mark = f"{part.name} {os.getpid()}"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )
        watch = MemoryWatch(process.pid, part.run, on_gpu=on_gpu)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            outcome.result, outcome.reason = "failed", f"not done after {limit_s:.0f} s"
            _end(process)
        else:
            if code:
                outcome.result, outcome.reason = "failed", f"exit code {code}"
        finally:
            outcome.memory = watch.stop()
            if left := end_marked(mark):
                note = f"{left} processes were left and ended"
                outcome.reason = f"{outcome.reason}; {note}".lstrip("; ")
    outcome.seconds = time.monotonic() - started
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask for an end, as a scheduler does, and kill after a while."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    process.kill()
    process.wait()


def end_marked(mark: str, variable: str = MARK) -> int:
    """Kill all processes with this value of the variable that still live; return their number."""
    # Ray's processes end by themselves a moment after the driver
    until = time.monotonic() + GRACE_S
    while (left := list(_marked(mark, variable))) and time.monotonic() < until:
        time.sleep(SAMPLE_S)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    return len(left)


def _marked(mark: str, variable: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class MemoryWatch:
    """Samples the memory in use: of the first GPU, or on a CPU of a process and its children."""

    def __init__(self, pid: int, run: Path | None, *, on_gpu: bool) -> None:
        """`run`: the run's folder, which has its phase."""
        self._pid, self._run, self._on_gpu = pid, run, on_gpu
        self._samples: list[tuple[float, str, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if run is not None:
            self._thread.start()

    def stop(self) -> list[tuple[float, str, float]]:
        """Return all samples."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._samples

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._stopped.wait(SAMPLE_S):
            used = gpu_mib() if self._on_gpu else _resident_mib(self._pid)
            self._samples.append((time.monotonic() - started, self._phase(), used))

    def _phase(self) -> str:
        assert self._run is not None
        with suppress(DataError):
            return read_status(self._run).phase
        return "start"


def gpu_mib() -> float:
    """Return the memory in use on the first GPU, by the driver."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _resident_mib(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        total = 0
        for one in family:
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total / 2**20
    return 0.0
