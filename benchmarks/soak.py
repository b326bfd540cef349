"""Growth of memory and of step time over many steps, also during saves.

The exit code is 1 if they grow.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared import script_parser, training_records, write_results

from megadapo.cli import parse, report_errors
from megadapo.cluster.processes import MIB, descendants, private_bytes
from megadapo.cluster.watch.guard import start_time
from megadapo.errors import ConfigError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.tables import TextTable

MAX_GROWTH_MIB = 10.0
"""Limit of a process's growth in private memory per 100 steps, after the first third."""
MAX_SLOWDOWN = 1.03
"""Limit of the last quarter's median step over the first quarter's."""
MAX_BESIDE_SAVE = 1.05
"""Limit of the step during a save over the steps around it."""
NUM_NEIGHBOURS = 3
"""Steps before and after a step during a save, for the comparison."""
FEWEST_STEPS = 12
"""Steps needed for quarters, and for a line through the last two thirds."""


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Private memory of one process over the last two thirds of the steps."""

    name: str
    pid: int
    mib: float
    """Memory at the end."""
    growth_mib: float
    """Growth per 100 steps, by linear regression."""


@dataclass(kw_only=True)
class Soak:
    """Measurements of a run, step by step."""

    num_steps: int
    save_every: int
    """Steps between checkpoints, which are written during the next step."""
    seconds: list[float] = field(default_factory=list)
    """Time of each step."""
    _memory: dict[tuple[int, str], dict[int, float]] = field(default_factory=dict)
    """MiB by step, by number and start time of a process."""
    _names: dict[int, str] = field(default_factory=dict)

    def observe(self, record: MetricRecord) -> None:
        """Record a step's time, and the memory of this process and of all its descendants."""
        step, seconds = record["step"], record["time/step_s"]
        assert step is not None and seconds is not None, "every record has them"
        self.seconds.append(float(seconds))
        for pid in (os.getpid(), *descendants(os.getpid())):
            if (started := start_time(pid)) is not None:
                self._names.setdefault(pid, _name(pid))
                values = self._memory.setdefault((pid, started), {})
                values[int(step)] = private_bytes(pid) / MIB

    @property
    def slowdown(self) -> float:
        """The last quarter's median step over the first quarter's."""
        quarter = len(self.seconds) // 4
        first, last = self.seconds[:quarter], self.seconds[-quarter:]
        return float(statistics.median(last) / statistics.median(first))

    @property
    def beside_save(self) -> float | None:
        """The median step during a save over the median of the steps around it.

        None with fewer than two saves that have enough steps around them.
        """
        ratios = []
        for number in range(self.save_every, len(self.seconds), self.save_every):
            around = self.seconds[max(0, number - NUM_NEIGHBOURS) : number]
            around += self.seconds[number + 1 :][:NUM_NEIGHBOURS]
            if len(around) == 2 * NUM_NEIGHBOURS:
                ratios.append(self.seconds[number] / statistics.median(around))
        return float(statistics.median(ratios)) if len(ratios) > 1 else None

    def processes(self) -> list[ProcessMemory]:
        """Return the processes alive in all of the last two thirds, the fastest growing first."""
        steps = range(self.num_steps // 3 + 1, self.num_steps + 1)
        found = [
            ProcessMemory(
                name=self._names[pid],
                pid=pid,
                mib=values[self.num_steps],
                growth_mib=100
                * statistics.linear_regression(steps, [values[step] for step in steps]).slope,
            )
            for (pid, _), values in self._memory.items()
            if all(step in values for step in steps)
        ]
        return sorted(found, key=lambda one: -one.growth_mib)

    @property
    def holds(self) -> bool:
        """Whether growth of processes and slowdown of steps are within the limits."""
        grows = any(one.growth_mib > MAX_GROWTH_MIB for one in self.processes())
        is_slow = self.slowdown > MAX_SLOWDOWN or (self.beside_save or 0.0) > MAX_BESIDE_SAVE
        return not grows and not is_slow


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps, print a table, and write JSON if requested; return 1 if something grows."""
    arguments = parse(script_parser(__doc__, num_steps=500), argv)
    if arguments.steps < FEWEST_STEPS:
        raise ConfigError(f"--steps must be at least {FEWEST_STEPS}")
    with training_records(arguments, arguments.steps) as (config, records):
        soak = Soak(num_steps=arguments.steps, save_every=config.checkpoint.every)
        for record in records:
            soak.observe(record)
    print(table(soak))
    write_results(arguments.json, report(soak))
    return 0 if soak.holds else 1


def table(soak: Soak) -> str:
    """Format the measurements, with the conclusion in the last line."""
    notes = [f"last quarter's median step over the first's: {soak.slowdown:.3f}"]
    if soak.beside_save is not None:
        notes.append(f"step during a save over the steps around it: {soak.beside_save:.3f}")
    notes.append(
        f"{'holds' if soak.holds else 'DOES NOT HOLD'}: at most {MAX_GROWTH_MIB:g} MiB a process "
        f"in 100 steps, {MAX_SLOWDOWN:g} x the time, and {MAX_BESIDE_SAVE:g} x during a save"
    )
    rows = [
        [one.name, str(one.pid), f"{one.mib:.0f}", f"{one.growth_mib:.1f}"]
        for one in soak.processes()
    ]
    head = ["process", "pid", "MiB", "MiB / 100 steps"]
    return TextTable(note="\n".join(notes), head=head, rows=rows).text()


def report(soak: Soak) -> dict[str, Any]:
    """Return the measurements as JSON values."""
    return {
        "num_steps": soak.num_steps,
        "slowdown": soak.slowdown,
        "save_every": soak.save_every,
        "beside_save": soak.beside_save,
        "seconds": [round(one, 4) for one in soak.seconds],
        "processes": [asdict(one) for one in soak.processes()],
        "holds": soak.holds,
    }


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"


if __name__ == "__main__":
    sys.exit(report_errors(main))
