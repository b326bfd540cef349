"""Stops a run in every way and every phase, and reports what became of it.

    python tools/faults/stops.py FOLDER --only signal=TERM,target=driver+group --budget-s 3000

One run is stopped and resumed again and again. Each cell starts its driver, waits until a step is
complete and the phase comes, and stops it. Exit code and status.json must be those of
docs/reliability.md, completed steps must be saved, nothing may be left, and the metrics must be
those of an undisturbed run. FOLDER/stops.json and stops.md have every cell; called again it adds
others. A full disk needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from megadapo.cluster.watch.guard import start_time
from megadapo.errors import DataError, InfraError, RunInterruptedError
from megadapo.observe.metrics.records import read_evaluations
from megadapo.run.state.status import Status, read_status

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from kills import differing_records, undisturbed  # noqa: E402

from faults.disturbed_run import (  # noqa: E402
    NAMES,
    environment_of,
    remove_leftovers,
    temporary_folder,
)
from tests.support import REPOSITORY  # noqa: E402
from tests.support.processes.small_disk import fill, mount  # noqa: E402
from tests.support.runs.whole_runs import NUM_STEPS, command, descendants  # noqa: E402

LONGEST_CELL = 8
"""The most steps that a cell needs."""
COMPARED = 2
"""A run that has fewer steps left to compare with the undisturbed one begins again."""
PHASES = {
    "start": ("start Ray", "start engines", "start trainer"),
    "rollout": ("rollout",),
    "update": ("train",),
    "publication": ("sync",),
    "save": ("checkpoint",),
    "evaluation": ("evaluate",),
    "closing": (),
}
"""Phases of status.json in which each phase is met; closing is what follows the last step."""
DISK = "disk full"
DAEMONS = {"control service": "gcs", "node daemon": "raylet"}
"""Kinds of process in `NAMES` that are killed."""
WAYS = (
    *product(("TERM", "INT", "HUP"), ("driver", "group", "session")),
    *(("TERM", "timeout"), ("TERM", "all"), ("HUP", "nohup"), ("HUP", "terminal")),
)
"""Signals and targets: `timeout` passes one on to its group, a terminal is closed, and a control
group's has all processes, those of Ray too."""
LAUNCHERS = {"timeout": ["timeout", "1d"], "nohup": ["nohup"], "terminal": ["script", "-qefc"]}
INTERRUPTED, FAILED = RunInterruptedError.exit_code, InfraError.exit_code
STATES = {0: "finished", INTERRUPTED: "stopped", FAILED: "failed"}
AGAIN_S = 1.0
"""Seconds between two signals, and from a full disk to the request to stop."""
END_S = 180.0
LEFTOVERS_S = 20.0


@dataclass
class Cell:
    """One way to stop a run, and what became of it."""

    signal: str
    target: str
    phase: str
    twice: bool = False
    met: str = ""
    """Phase of status.json when it was stopped."""
    code: int | None = None
    seconds: float | None = None
    """From the stop to the end of the driver."""
    step: int = -1
    saved: int = -1
    reason: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def key(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("signal", "target", "phase", "twice")}

    def is_in(self, chosen: Mapping[str, str]) -> bool:
        """Return whether its parts are chosen, as by {"target": "driver+group"}."""
        return all(self.key[name] in text.split("+") for name, text in chosen.items())

    def exit_codes(self) -> set[int]:
        """Return the exit codes that docs/reliability.md allows."""
        ends = {0} if self.phase == "closing" else set()
        if self.signal == "control service":
            return {FAILED} | ends
        if self.signal in (DISK, "node daemon") or self.target == "all":
            # Ray ends a driver that puts an object into its store without the node's daemon, and
            # one that has given up a full disk handles no signal any more
            late = {-signal.SIGTERM} if self.signal == DISK and ends else set()
            return {INTERRUPTED, FAILED, 1} | ends | late
        number = signal.Signals[f"SIG{self.signal}"]
        # a driver that starts has no handlers at first
        at_once = self.phase == "start" or (self.twice and self.signal != "HUP")
        return {INTERRUPTED} | ({-number, 128 + number} if at_once else set()) | ends


def all_cells() -> Iterator[Cell]:
    """Yield the cells of the matrix."""
    for phase in PHASES:
        yield from (Cell(daemon, "driver", phase) for daemon in DAEMONS)
        if os.geteuid() == 0:
            yield Cell(DISK, "driver", phase)
    for twice, (name, target), phase in product((False, True), WAYS, PHASES):
        yield Cell(name, target, phase, twice)


class Stops:
    """A run that is stopped in one cell after the other, on a small disk."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        """`num_steps`: of the undisturbed run, with which the stopped one is compared."""
        folder.mkdir(parents=True, exist_ok=True)
        self._num_steps = num_steps
        self._expected = undisturbed(folder / "undisturbed", (), num_steps=num_steps)
        self._disk, self._output = folder / "disk", folder / "output.txt"
        self._disk.mkdir(exist_ok=True)
        if os.geteuid() == 0 and not self._disk.is_mount():
            mount(self._disk, size="96m")
        self._folder = self._disk / "run"
        self._number = 0
        self._driver: subprocess.Popen[bytes]
        self._pid = 0
        """The driver's, or its launcher's at first."""

    def close(self) -> None:
        """Unmount the disk, which loses the run."""
        if self._disk.is_mount():
            # a killed process may still be there
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    def stop(self, cell: Cell) -> None:
        """Start the driver, stop it, and note what became of it."""
        self._number += 1
        before, num_steps = self._status, self._num_steps + LONGEST_CELL
        if before is not None and before.step > self._num_steps - COMPARED:
            shutil.rmtree(self._folder)
            before = None
        if cell.phase == "closing":
            # even: the last step is evaluated, as it is in the undisturbed run
            num_steps = max(NUM_STEPS, ((before.step if before else 0) + 3) // 2 * 2)
        temporary = temporary_folder(self._number)
        self._start(cell, temporary, num_steps)
        try:
            if self._until(lambda: self._is_there(cell, before)):
                self._stop_now(cell)
            else:
                cell.problems.append("the phase did not come")
        finally:
            (self._disk / "filler").unlink(missing_ok=True)
            deadline = time.monotonic() + LEFTOVERS_S
            while descendants(self._folder) and time.monotonic() < deadline:
                time.sleep(0.1)
            left = remove_leftovers(self._folder, temporary)
            cell.problems += [f"left: {name[:80]}" for name in left]
            self._driver.wait()
        self._check(cell)

    @property
    def _status(self) -> Status | None:
        with suppress(DataError):
            return read_status(self._folder)
        return None

    def _start(self, cell: Cell, temporary: Path, num_steps: int) -> None:
        words = command(self._folder, num_steps=num_steps)
        if cell.target == "terminal":
            words = [shlex.join(words), "/dev/null"]
        with self._output.open("wb") as output:
            self._driver = subprocess.Popen(
                [*LAUNCHERS.get(cell.target, []), *words],
                cwd=REPOSITORY,
                env=environment_of(self._folder, temporary),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._pid = self._driver.pid

    def _is_there(self, cell: Cell, before: Status | None) -> bool:
        status = self._status
        if status is None or (before is not None and status.driver == before.driver):
            return False
        if cell.phase == "closing":
            return status.step == status.num_steps
        if cell.phase == "start":
            # Ray has no daemons in the first
            return (
                status.phase == PHASES["start"][1 if cell.signal in DAEMONS else self._number % 3]
            )
        return status.resumed_from < status.step and status.phase in PHASES[cell.phase]

    def _until(self, condition: Callable[[], bool], seconds: float = 300.0) -> bool:
        """Wait for a condition; return False if the driver ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if start_time(self._pid) is None or time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _stop_now(self, cell: Cell) -> None:
        status = self._status
        assert status is not None, "the phase came from it"
        cell.met, stopped_at, self._pid = status.phase, time.monotonic(), status.pid
        if cell.signal == DISK:
            fill(self._disk)
            time.sleep(AGAIN_S)
        for _ in range(1 + cell.twice):
            self._signal(cell)
            self._until(lambda: False, AGAIN_S)
        if cell.signal == "HUP":
            # it ends nothing: the run reaches another step, or its end
            step = min(status.step + 1, status.num_steps)
            self._until(lambda: (now := self._status) is not None and now.step >= step)
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
        self._until(lambda: False, END_S)
        cell.seconds = round(time.monotonic() - stopped_at, 1)
        with suppress(subprocess.TimeoutExpired):
            cell.code = self._driver.wait(AGAIN_S)

    def _signal(self, cell: Cell) -> None:
        own, processes = self._driver.pid, descendants(self._folder)
        number = signal.SIGTERM if cell.signal == DISK else signal.SIGKILL
        if cell.signal in DAEMONS:
            named = NAMES[DAEMONS[cell.signal]]
            targets = [pid for pid, name in processes if re.search(named, name.split("\0")[0])]
        elif cell.target in ("group", "nohup"):
            targets = [-own]
        elif cell.target in ("timeout", "terminal"):
            targets = [own]
        elif cell.target == "driver":
            targets = [self._pid]
        else:
            targets = [pid for pid, _ in processes if cell.target == "all" or _session(pid) == own]
        if cell.signal in ("TERM", "INT", "HUP") and cell.target != "terminal":
            number = signal.Signals[f"SIG{cell.signal}"]
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _check(self, cell: Cell) -> None:
        status = self._status
        assert status is not None, "the phase came from it"
        cell.step, cell.saved = status.step, status.checkpoint_step
        cell.reason = status.reason or ""
        if cell.target != "terminal":
            if cell.code not in cell.exit_codes():
                cell.problems.append(f"exit code {cell.code}")
            wanted = "running" if cell.code is None else STATES.get(cell.code, "running")
            # a full disk keeps the file as it was; `megadapo status` sees that its driver is gone
            if status.state not in (wanted, "running" if cell.signal == DISK else wanted):
                cell.problems.append(f"state {status.state}, not {wanted}")
        may_lose = status.state == "running" or cell.signal in (DISK, "node daemon")
        if not may_lose and status.step != status.checkpoint_step:
            cell.problems.append(f"step {status.step}, saved {status.checkpoint_step}")
        is_named = "gcs_server" in cell.reason or "raylet" in cell.reason
        if cell.signal in DAEMONS and cell.code == FAILED and not is_named:
            cell.problems.append("the reason names no daemon")
        if (self._folder / "metrics.jsonl").exists():
            cell.problems += self._differences()[:3]
        if cell.problems:
            cell.problems.append(self._output.read_text(errors="replace")[-2000:])

    def _differences(self) -> list[str]:
        """Return metrics and evaluations that differ from those of the undisturbed run."""
        problems = differing_records(self._folder, self._expected)
        expected = {one.step: one for one in read_evaluations(self._expected)}
        found = read_evaluations(self._folder)
        both = [one for one in found if one.step in expected]
        return problems + [f"{one} is not repeated" for one in both if one != expected[one.step]]


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def table(cells: list[Cell]) -> str:
    """Return the cells as a table in Markdown."""
    names = ("signal", "target", "phase", "times", "met in", "exit code", "s", "step", "saved")
    lines = [f"| {' | '.join(names)} | problems |", "|" + "-|" * (len(names) + 1)]
    for cell in cells:
        problems = " ".join("; ".join(cell.problems).split()).replace("|", "/")[:300] or "none"
        values = (cell.signal, cell.target, cell.phase, 1 + cell.twice, cell.met, cell.code)
        results = (*values, cell.seconds, cell.step, cell.saved, problems)
        lines.append(f"| {' | '.join(map(str, results))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the chosen cells that no earlier call has run; return 1 if one had a problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", action="append", help="as in signal=TERM,target=driver+group; repeatable"
    )
    parser.add_argument("--num-steps", type=int, default=40, help="of the undisturbed run")
    parser.add_argument("--budget-s", type=float, default=1e9)
    arguments = parser.parse_args()
    wanted = [dict(word.split("=") for word in one.split(",")) for one in arguments.only or ()]
    log = arguments.folder / "stops.json"
    done = [Cell(**entry) for entry in json.loads(log.read_text())] if log.exists() else []
    until, keys = time.monotonic() + arguments.budget_s, [cell.key for cell in done]
    stops = Stops(arguments.folder, arguments.num_steps)
    try:
        for cell in all_cells():
            is_new = cell.key not in keys and time.monotonic() < until
            if not is_new or (wanted and not any(map(cell.is_in, wanted))):
                continue
            stops.stop(cell)
            done.append(cell)
            print(table([cell]).splitlines()[-1], flush=True)
            log.write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n")
            log.with_suffix(".md").write_text(table(done))
    finally:
        stops.close()
    return int(any(cell.problems for cell in done))


if __name__ == "__main__":
    sys.exit(main())
