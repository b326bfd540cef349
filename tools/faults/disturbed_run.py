"""A supervised run whose processes are killed, and whose infrastructure fails."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megadapo.errors import DataError
from megadapo.run.state.status import Status, read_status

sys.path.insert(0, str(Path(__file__).parents[2]))
from faults.engine_changes import CHANGES, change_engines  # noqa: E402
from faults.episode_server import SERVER, EpisodeServer  # noqa: E402
from faults.infrastructure import FAULTS, Infrastructure  # noqa: E402
from tests.support import COMPILED, REPOSITORY  # noqa: E402 - needs the path above
from tests.support.runs.whole_runs import command, descendants, marked  # noqa: E402

NUM_STEPS = 16
EPISODES = ("environment", "host")
"""Further kinds of process in a run with environments."""
TARGETS = ("engine", "rank", "verifier", "everything", "raylet", "vllm", "gcs", "driver")
MOMENTS = ("start", "rollout", "train", "sync", "any", "checkpoint")
EPISODE_MOMENTS = ("rollout", "rollout", "rollout", "any")
"""Moments of a run with environments: most kills meet open episodes."""
VICTIMS = {"sockets reset": "engine", "daemon stopped": "raylet", "slow-down": "vllm"}
"""Kind of process that another fault hits."""
NAMES = {
    "rank": r"ray::TrainerWorker",
    "engine": r"ray::RolloutEngine",
    "vllm": r"VLLM::",
    "verifier": r"symbolic_worker",
    "raylet": r"/raylet/raylet\b",
    "gcs": r"gcs_server",
    "driver": r"megadapo\.cli",
    "everything": "",
    "environment": r"megadapo\.environments\.worker",
    "host": r"ray::EpisodeHost",
}
"""Command line of each kind of process."""
REGISTRATION = "/dev/shm/__KMP_REGISTERED_LIB_"
"""One page by which OpenMP finds a second copy of itself; it stays where a process is killed."""
TINY_BYTES = 1 << 20
"""vLLM leaves a rendezvous of 2 KB in the temporary folder."""
PHASE_S = 0.3
POLL_S = 0.05
SCAN_S = 2.0
"""Seconds between two scans of shared memory."""


def temporary_folder(number: int) -> Path:
    """Return a new temporary folder for a run, with a short path: those of sockets have an end."""
    folder = Path("/tmp") / f"k{os.getpid()}-{number}"
    folder.mkdir()
    # what was compiled before need not be compiled again, also where only TMPDIR says
    COMPILED.mkdir(exist_ok=True)
    (folder / COMPILED.name).symlink_to(COMPILED)
    return folder


def environment_of(run: Path, temporary: Path) -> dict[str, str]:
    """Return the environment of a run that is found by its folder's name."""
    names = {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    return {"TORCHINDUCTOR_CACHE_DIR": str(COMPILED)} | marked(run) | names


def remove_leftovers(run: Path, temporary: Path) -> list[str]:
    """Return the processes, sockets and files that a run left, and remove them."""
    left = [name.replace("\0", " ") for _, name in descendants(run)]
    # what was compiled is for the next run on this machine
    entries = (path for path in temporary.iterdir() if path.name != COMPILED.name)
    for path in (path for entry in entries for path in (entry, *entry.rglob("*"))):
        if path.is_socket() or (path.is_file() and path.stat().st_size > TINY_BYTES):
            left.append(str(path))
    shutil.rmtree(temporary)
    for pid, _ in descendants(run):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@dataclass
class Kill:
    """One process or more that got a signal, or another fault, and what became of the run."""

    seed: int
    signal: str
    target: str
    """A kind of process, a fault of the infrastructure, or a change of the engines."""
    moment: str
    """Phase in which it was planned."""
    phase: str = ""
    """Phase that the driver reported."""
    step: int = -1
    """Last step that was complete."""
    command: str = ""
    """The process's, or what the fault was."""
    outcome: str = ""
    """"went on": the same driver; "started again": another one."""
    lost_s: float | None = None
    """From its end until another step was complete, less what a step takes."""


@dataclass
class DisturbedRun:
    """A supervised run of which processes are killed."""

    folder: Path
    """Path that the run uses."""
    seen: Path
    """The same folder where it can always be read."""
    how: signal.Signals
    overrides: Sequence[str]
    infrastructure: Infrastructure | None
    step_s: float
    """Seconds of an undisturbed step."""
    seed: int
    until: float
    """On the monotonic clock, when the run is to be stopped."""
    kills: list[Kill] = field(default_factory=list)
    recipe: Path | str = "configs/quickstart.toml"
    num_steps: int = NUM_STEPS
    phase_s: float = PHASE_S
    """Longest time from the beginning of a phase until it is disturbed."""
    moments: Sequence[str] = MOMENTS
    server: EpisodeServer | None = None
    """Server of the run's episodes."""
    segments: set[str] = field(default_factory=set)
    """Shared memory that any process of the run has had."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._looked = 0.0
        self._temporary = temporary_folder(self.seed)
        environment = environment_of(self.folder, self._temporary)
        if self.infrastructure is not None:
            environment |= self.infrastructure.environment
        self.seen.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command(
                self.folder,
                "--restarts=30",
                *self.overrides,
                num_steps=self.num_steps,
                recipe=self.recipe,
            ),
            cwd=REPOSITORY,
            env=environment,
            stdout=(self.seen / "output.txt").open("a"),
            stderr=subprocess.STDOUT,
        )

    def disturb(self, targets: Sequence[str]) -> None:
        """Kill one after the other, each when the run has recovered from the one before."""
        for target in targets:
            how = self.how.name if target in NAMES else ""
            # a run that starts cannot be asked for other engines
            moments = self.moments if target not in CHANGES else MOMENTS[1:]
            kill = Kill(self.seed, how, target, self._random.choice(moments))
            if not self._wait_for(kill.moment) or not self._disturb_once(kill):
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
        segments = [name for name in sorted(self.segments) if Path(name).exists()]
        return segments + remove_leftovers(self.folder, self._temporary)

    @property
    def _status(self) -> Status | None:
        try:
            return read_status(self.seen)
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

    def _disturb_once(self, kill: Kill) -> bool:
        """Kill or cause a fault, as soon as there is such a process, and see what becomes of it."""
        victims: list[tuple[psutil.Process, str]] = []

        def found() -> bool:
            victims[:] = self._victims(VICTIMS.get(kill.target, kill.target))
            return bool(victims)

        if kill.target in NAMES.keys() | VICTIMS.keys() and not self._until(found):
            return False
        before = self._status
        kill.phase, kill.step = ("", 0) if before is None else (before.phase, before.step)
        processes = [process for process, _ in victims]
        if kill.target in CHANGES:
            kill.command = change_engines(kill.target, self.seen, processes, self._random)
        elif kill.target in FAULTS:
            assert self.infrastructure is not None
            kill.command = self.infrastructure.cause(kill.target, processes, self._random)
        elif kill.target == SERVER:
            assert self.server is not None
            kill.command = self.server.restart(self._random)
        else:
            kill.command = " ".join(victims[0][1].split())[:60]
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(self.how)
        ended_at = time.monotonic()
        recovered = self._until(lambda: (now := self._status) is not None and now.step > kill.step)
        after = self._status
        if after is None or not (recovered or after.state == "finished"):
            kill.outcome = "out of time" if self._process.poll() is None else "given up"
            return True
        same = before is not None and after.pid == before.pid
        kill.outcome = "went on" if same else "started again"
        kill.lost_s = round(max(0.0, time.monotonic() - ended_at - self.step_s), 1)
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
