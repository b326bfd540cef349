"""Kills processes of supervised runs at random instants, and reports the outcome of each run.

    python tools/kills.py FOLDER --kills 50 --budget_s 500

runs for that time or that number of kills; called again it continues. FOLDER/kills.json has every
kill. Each run resumes by itself. In the end its metrics equal those of an undisturbed run, and no
process, shared memory or temporary file of it remains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

from megadapo.errors import DataError, RunInterruptedError
from megadapo.observe.metrics.records import read_evaluations
from megadapo.run.state.status import Status, read_status

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support import COMPILED, REPOSITORY  # noqa: E402 - needs the path above
from tests.support.runs.whole_runs import (  # noqa: E402
    command,
    descendants,
    marked,
    metrics,
    run,
    untimed,
)

NUM_STEPS = 8
KILLS_PER_RUN = 5
OVERRIDES = ("--trainer.data_parallel=2", "--trainer.num_threads=1")
"""Two ranks: one that is killed leaves the other waiting for it."""
DEADLINES = (
    "--rollout.engine_progress_timeout_s=20",
    "--trainer.progress_timeout_s=20",
    "--weights.deadline_s=20",
)
"""For processes that are stopped; Ray's and the driver's are constants: 60 and 120 s."""
TARGETS = ("engine", "rank", "verifier", "everything", "raylet", "vllm", "gcs", "driver")
MOMENTS = ("start", "rollout", "train", "sync", "any", "checkpoint")
NAMES = {
    "rank": r"ray::TrainerWorker",
    "engine": r"ray::RolloutEngine",
    "vllm": r"VLLM::",
    "verifier": r"symbolic_worker",
    "raylet": r"/raylet/raylet\b",
    "gcs": r"gcs_server",
    "driver": r"megadapo\.cli",
    "everything": "",
}
"""Command line of each kind of process."""
REGISTRATION = "/dev/shm/__KMP_REGISTERED_LIB_"
"""One page by which OpenMP finds a second copy of itself; it stays where a process is killed."""
TINY_BYTES = 1 << 20
"""vLLM leaves sockets and a rendezvous of 2 KB in the temporary folder, and Ray its logs."""
POLL_S = 0.05
SCAN_S = 2.0
"""Seconds between two scans of shared memory."""


@dataclass
class Kill:
    """One process or more that got a signal, and what became of the run."""

    seed: int
    signal: str
    target: str
    moment: str
    """Phase in which the kill was planned."""
    phase: str = ""
    """Phase that the driver reported."""
    step: int = -1
    """Last step that was complete."""
    command: str = ""
    outcome: str = ""
    """"went on": the same driver; "started again": another one."""
    lost_s: float | None = None
    """Until another step was complete, less what a step takes."""


@dataclass
class DisturbedRun:
    """A supervised run of which processes are killed."""

    folder: Path
    how: signal.Signals
    overrides: Sequence[str]
    step_s: float
    """Seconds of an undisturbed step."""
    seed: int
    until: float
    """On the monotonic clock, when the run is to be stopped."""
    kills: list[Kill] = field(default_factory=list)
    segments: set[str] = field(default_factory=set)
    """Shared memory that any process of the run has had."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._looked = 0.0
        # short: paths of sockets have an end
        self._temporary = Path("/tmp") / f"k{os.getpid()}-{self.seed}"
        self._temporary.mkdir()
        environment = marked(self.folder)
        environment |= {"TMPDIR": str(self._temporary), "RAY_TMPDIR": str(self._temporary)}
        # what was compiled before need not be compiled again
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command(self.folder, "--restarts=30", *self.overrides, num_steps=NUM_STEPS),
            cwd=REPOSITORY,
            env=environment,
            stdout=(self.folder / "output.txt").open("a"),
            stderr=subprocess.STDOUT,
        )

    def disturb(self, targets: Iterator[str], num_kills: int) -> None:
        """Kill one after the other, each when the run has recovered from the one before."""
        while len(self.kills) < num_kills:
            moment = self._random.choice(MOMENTS)
            kill = Kill(self.seed, self.how.name, next(targets), moment)
            if not self._wait_for(moment) or not self._signal_one(kill):
                return
            self.kills.append(kill)

    def end(self) -> int:
        """Wait for the end, or stop the run where its time is up; returns the exit code."""
        try:
            left_s = max(1.0, self.until - time.monotonic())
            return self._process.wait(timeout=left_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            return self._process.wait(timeout=120)

    def leftovers(self) -> list[str]:
        """Return processes, shared memory and files that a finished run left."""
        left = [name.replace("\0", " ") for _, name in descendants(self.folder)]
        left += [name for name in sorted(self.segments) if Path(name).exists()]
        # what was compiled is for the next run on this machine
        entries = (path for path in self._temporary.iterdir() if path.name != COMPILED.name)
        files = (path for entry in entries for path in (entry, *entry.rglob("*")) if path.is_file())
        left += [str(path) for path in files if path.stat().st_size > TINY_BYTES]
        shutil.rmtree(self._temporary)
        for pid, _ in descendants(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    @property
    def _status(self) -> Status | None:
        try:
            return read_status(self.folder)
        except DataError:
            return None

    def _wait_for(self, moment: str) -> bool:
        """Wait until the run is there; False where it has ended before."""
        delay = self._random.uniform(0.0, 1.0)
        if moment == "start":
            time.sleep(20.0 * delay)
            return self._process.poll() is None

        def is_there() -> bool:
            status = self._status
            if status is None or status.state != "running" or status.step <= status.resumed_from:
                return False
            return moment in ("any", status.phase)

        if not self._until(is_there):
            return False
        time.sleep(delay * (2 * self.step_s if moment == "any" else 0.3))
        return self._process.poll() is None

    def _until(self, condition: Callable[[], object]) -> bool:
        while self._process.poll() is None and time.monotonic() < self.until:
            self._note_segments()
            if condition():
                return True
            time.sleep(POLL_S)
        return False

    def _signal_one(self, kill: Kill) -> bool:
        """Signal a process of the kind, waiting for there to be one, and see what becomes of it."""
        victims: list[tuple[psutil.Process, str]] = []

        def found() -> bool:
            victims.extend(self._victims(kill.target))
            return bool(victims)

        if not self._until(found):
            return False
        before = self._status
        kill.phase, kill.step = ("", 0) if before is None else (before.phase, before.step)
        kill.command = " ".join(victims[0][1].split())[:60]
        for process, _ in victims:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(self.how)
        killed_at = time.monotonic()
        recovered = self._until(lambda: (now := self._status) is not None and now.step > kill.step)
        after = self._status
        if after is None or not (recovered or after.state == "finished"):
            kill.outcome = "out of time" if self._process.poll() is None else "given up"
            return True
        same = before is not None and after.pid == before.pid
        kill.outcome = "went on" if same else "started again"
        kill.lost_s = round(time.monotonic() - killed_at - self.step_s, 1)
        return True

    def _victims(self, target: str) -> list[tuple[psutil.Process, str]]:
        found, supervisor = [], self._process.pid
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(supervisor).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    name = " ".join(process.cmdline())
                    is_own = target != "driver" or process.ppid() == supervisor
                    if is_own and re.search(NAMES[target], name):
                        found.append((process, name))
        return found if target == "everything" else found and [self._random.choice(found)]

    def _note_segments(self) -> None:
        if time.monotonic() < self._looked + SCAN_S:
            return
        self._looked = time.monotonic()
        for pid, _ in descendants(self.folder):
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found = re.findall(r"(/dev/shm/\S+)$", maps, re.M)
                self.segments.update(name for name in found if not name.startswith(REGISTRATION))


def undisturbed(folder: Path, overrides: Sequence[str]) -> Path:
    """The same run without kills; made once."""
    if not (folder / "plot.png").exists():
        run(folder, *overrides, num_steps=NUM_STEPS)
    return folder


def campaign(
    folder: Path,
    *,
    num_kills: int,
    budget_s: float,
    how: signal.Signals = signal.SIGKILL,
    targets: Sequence[str] = TARGETS,
    overrides: Sequence[str] = OVERRIDES,
) -> list[str]:
    """Continue the kills in FOLDER/kills.json; return the problems of a finished run."""
    if how == signal.SIGSTOP:
        overrides = (*overrides, *DEADLINES)
    until = time.monotonic() + budget_s
    expected = undisturbed(folder / "undisturbed", overrides)
    step_s = sorted(record["time/step_s"] for record in metrics(expected))[NUM_STEPS // 2]
    log = folder / "kills.json"
    runs: list[dict[str, Any]] = json.loads(log.read_text()) if log.exists() else []
    while time.monotonic() < until:
        so_far = sum(len(one["kills"]) for one in runs)
        if so_far >= num_kills and (not runs or runs[-1]["ended"]):
            break
        if not runs or runs[-1]["ended"]:
            runs.append({"folder": f"run-{len(runs)}", "ended": False, "kills": [], "problems": []})
        entry, wanted = runs[-1], min(KILLS_PER_RUN, num_kills - so_far)
        kinds = islice(cycle(targets), so_far % len(targets), None)
        disturbed = DisturbedRun(folder / entry["folder"], how, overrides, step_s, so_far, until)
        try:
            disturbed.disturb(kinds, wanted)
        finally:
            code = disturbed.end()
            entry["kills"] += [asdict(kill) for kill in disturbed.kills]
            entry["problems"] += [f"left: {name}" for name in disturbed.leftovers()]
            entry["ended"] = code != RunInterruptedError.exit_code
            if code == 0:
                entry["problems"] += _differences(folder / entry["folder"], expected)
            elif entry["ended"]:
                entry["problems"].append(f"exit code {code}")
            log.write_text(json.dumps(runs, indent=1) + "\n")
    return [problem for one in runs for problem in one["problems"]]


def _differences(folder: Path, expected: Path) -> list[str]:
    problems = []
    pairs = zip(untimed(metrics(folder)), untimed(metrics(expected)), strict=False)
    for found, wanted in pairs:
        names = [name for name in wanted if found.get(name) != wanted[name]]
        problems += [f"step {wanted['step']}: {n} {found.get(n)} != {wanted[n]}" for n in names]
    if len(metrics(folder)) != NUM_STEPS:
        problems.append(f"{len(metrics(folder))} of {NUM_STEPS} steps")
    if read_evaluations(folder) != read_evaluations(expected):
        problems.append("evaluations differ")
    return problems


def table(path: Path) -> str:
    """Return FOLDER/kills.json as a table."""
    lines = ["| signal | target | phase | after step | outcome | seconds lost |", "|-|-|-|-|-|-|"]
    for entry in json.loads(path.read_text()):
        for kill in entry["kills"]:
            values = (kill[k] for k in ("signal", "target", "phase", "step", "outcome", "lost_s"))
            lines.append("| " + " | ".join(str(value) for value in values) + " |")
        lines += [f"{entry['folder']}: {problem}" for problem in entry["problems"]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--budget_s", type=float, default=1e9)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    arguments = parser.parse_args()
    found = campaign(
        arguments.folder,
        num_kills=arguments.kills,
        budget_s=arguments.budget_s,
        how=signal.Signals[arguments.signal],
        targets=arguments.targets,
    )
    print(table(arguments.folder / "kills.json"))
    sys.exit(1 if found else 0)
