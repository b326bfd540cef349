"""Whether a run of many steps keeps the memory of its processes and its speed, beside its saves
as well."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megadapo.cluster.processes import MIB, descendants, private_bytes
from megadapo.cluster.watch.guard import start_time
from megadapo.lab.bench.step import machine
from megadapo.observe.metrics.records import MetricRecord

MAX_GROWTH_MIB = 10.0
"""Private memory that a process may take in 100 steps, once a third of the steps is done."""
MAX_SLOWDOWN = 1.03
"""The last quarter's median step over the first quarter's."""
MAX_BESIDE_SAVE = 1.05
"""The step while a checkpoint is written over the steps around it."""
AROUND = 3
"""Steps before and after it that a step beside a save is compared with."""
FEWEST_STEPS = 12
"""Until there is a quarter, and a line through the last two thirds."""


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """The private memory of one process over the last two thirds of the steps."""

    name: str
    pid: int
    mib: float
    """At the end."""
    growth_mib: float
    """Of a straight line through it, in 100 steps."""


@dataclass(kw_only=True)
class Soak:
    """What a run came to, step by step."""

    num_steps: int
    save_every: int
    """Steps between checkpoints, each of which is written while the next step goes on."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    _seen: dict[tuple[int, str], dict[int, float]] = field(default_factory=dict)
    """By number and start of a process: step -> MiB."""
    _names: dict[int, str] = field(default_factory=dict)

    def look(self, record: MetricRecord) -> None:
        """Note a step's time, and the memory of this process and of all that it has started."""
        step, seconds = record["step"], record["time/step_s"]
        assert step is not None and seconds is not None, "every record has them"
        self.seconds.append(float(seconds))
        for pid in (os.getpid(), *descendants(os.getpid())):
            if (started := start_time(pid)) is not None:
                self._names.setdefault(pid, _name(pid))
                values = self._seen.setdefault((pid, started), {})
                values[int(step)] = private_bytes(pid) / MIB

    @property
    def slowdown(self) -> float:
        """The last quarter's median step over the first quarter's."""
        quarter = len(self.seconds) // 4
        first, last = self.seconds[:quarter], self.seconds[-quarter:]
        return float(statistics.median(last) / statistics.median(first))

    @property
    def beside_save(self) -> float | None:
        """The median step beside a save over the median of the steps around it; None where fewer
        than two saves have as many steps around them."""
        ratios = [
            self.seconds[after] / statistics.median(around)
            for after in range(self.save_every, len(self.seconds), self.save_every)
            if len(around := self._around(after)) == 2 * AROUND
        ]
        return float(statistics.median(ratios)) if len(ratios) > 1 else None

    def _around(self, number: int) -> list[float]:
        return self.seconds[max(0, number - AROUND) : number] + self.seconds[number + 1 :][:AROUND]

    def processes(self) -> list[ProcessMemory]:
        """Those that were there all through the last two thirds, the fastest growing first."""
        steps = range(self.num_steps // 3 + 1, self.num_steps + 1)
        found = [
            ProcessMemory(
                name=self._names[pid],
                pid=pid,
                mib=values[self.num_steps],
                growth_mib=100 * _slope(steps, [values[step] for step in steps]),
            )
            for (pid, _), values in self._seen.items()
            if all(step in values for step in steps)
        ]
        return sorted(found, key=lambda one: -one.growth_mib)

    @property
    def holds(self) -> bool:
        """Whether no process grows, and steps get no slower, beyond the limits."""
        grows = any(one.growth_mib > MAX_GROWTH_MIB for one in self.processes())
        is_slow = self.slowdown > MAX_SLOWDOWN or (self.beside_save or 0.0) > MAX_BESIDE_SAVE
        return not grows and not is_slow


def run(
    records: Iterable[MetricRecord], *, num_steps: int, save_every: int, json_file: Path | None
) -> bool:
    """Take the steps, look after each of them, print a table, and write it down if asked to.

    Returns:
        Whether memory and speed hold.
    """
    soak = Soak(num_steps=num_steps, save_every=save_every)
    for record in records:
        soak.look(record)
    print(table(soak))
    if json_file is not None:
        json_file.write_text(json.dumps(report(soak), indent=2) + "\n")
    return soak.holds


def table(soak: Soak) -> str:
    """What was measured as text, with the verdict in its last line."""
    lines = [f"{'process':18}{'pid':>9}{'MiB':>9}{'MiB / 100 steps':>18}"]
    lines += [
        f"{one.name:18}{one.pid:9}{one.mib:9.0f}{one.growth_mib:18.1f}" for one in soak.processes()
    ]
    lines.append(f"last quarter's median step over the first's: {soak.slowdown:.3f}")
    if soak.beside_save is not None:
        lines.append(f"step beside a save over the steps around it: {soak.beside_save:.3f}")
    lines.append(
        f"{'holds' if soak.holds else 'DOES NOT HOLD'}: at most {MAX_GROWTH_MIB:g} MiB a process "
        f"in 100 steps, {MAX_SLOWDOWN:g} x the time, and {MAX_BESIDE_SAVE:g} x beside a save"
    )
    return "\n".join(lines)


def report(soak: Soak) -> dict[str, Any]:
    """The same as JSON holds it."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "num_steps": soak.num_steps,
        "slowdown": soak.slowdown,
        "save_every": soak.save_every,
        "beside_save": soak.beside_save,
        "seconds": [round(one, 4) for one in soak.seconds],
        "processes": [asdict(one) for one in soak.processes()],
        "holds": soak.holds,
    }


def _slope(steps: Sequence[int], values: Sequence[float]) -> float:
    return float(statistics.linear_regression(steps, values).slope)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"
