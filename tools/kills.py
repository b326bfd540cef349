"""Kills processes of supervised runs at random instants, and reports the outcome of each run.

    python tools/kills.py FOLDER --kills 50 --faults 20 --budget_s 500

runs for that time or that number of kills; called again it continues. FOLDER/kills.json has every
kill. Each run resumes by itself. In the end its metrics equal those of an undisturbed run, no
checkpoint was condemned, and no process, shared memory or temporary file of it remains.

With --faults the run's folder is on a file server that fails, a judge that goes away is asked for
rewards, and connections, Ray's daemons and the clock are disturbed: tools/faults/infrastructure.py.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from megadapo.errors import RunInterruptedError
from megadapo.observe.metrics.records import read_evaluations

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.disturbed_run import NUM_STEPS, TARGETS, DisturbedRun  # noqa: E402
from faults.infrastructure import FAULTS, Infrastructure  # noqa: E402

from tests.support.runs.whole_runs import metrics, run, untimed  # noqa: E402 - needs the path above

KILLS_PER_RUN = 5
OVERRIDES = ("--trainer.data_parallel=2", "--trainer.num_threads=1")
"""Two ranks: one that is killed leaves the other waiting for it."""
DEADLINES = (
    "--rollout.engine_progress_timeout_s=20",
    "--trainer.progress_timeout_s=20",
    "--weights.deadline_s=20",
)
"""For processes that are stopped; Ray's and the driver's are constants: 60 and 120 s."""


def undisturbed(folder: Path, overrides: Sequence[str]) -> Path:
    """The same run without kills; made once."""
    if not (folder / "plot.png").exists():
        run(folder, *overrides, num_steps=NUM_STEPS)
    return folder


def campaign(
    folder: Path,
    *,
    targets: Sequence[str],
    budget_s: float,
    how: signal.Signals,
    infrastructure: Infrastructure | None,
) -> list[str]:
    """Continue the kills in FOLDER/kills.json; return the problems of a finished run.

    Args:
        targets: a kind of process, or a fault, for each kill.
    """
    overrides = (*OVERRIDES, *(DEADLINES if how == signal.SIGSTOP else ()))
    mount = served = folder
    if infrastructure is not None:
        overrides += infrastructure.overrides
        mount, served = infrastructure.mount, infrastructure.served
    until = time.monotonic() + budget_s
    expected = undisturbed(folder / "undisturbed", overrides)
    step_s = sorted(record["time/step_s"] for record in metrics(expected))[NUM_STEPS // 2]
    log = folder / "kills.json"
    runs: list[dict[str, Any]] = json.loads(log.read_text()) if log.exists() else []
    while time.monotonic() < until:
        so_far = sum(len(one["kills"]) for one in runs)
        if so_far >= len(targets) and (not runs or runs[-1]["ended"]):
            break
        if not runs or runs[-1]["ended"]:
            runs.append({"folder": f"run-{len(runs)}", "ended": False, "kills": [], "problems": []})
        entry = runs[-1]
        disturbed = DisturbedRun(
            mount / entry["folder"],
            served / entry["folder"],
            how,
            overrides,
            infrastructure,
            step_s,
            so_far,
            until,
        )
        try:
            disturbed.disturb(targets[so_far : so_far + KILLS_PER_RUN])
        finally:
            code = disturbed.end()
            entry["kills"] += [asdict(kill) for kill in disturbed.kills]
            entry["problems"] += [f"left: {name}" for name in disturbed.leftovers()]
            entry["ended"] = code != RunInterruptedError.exit_code
            if code == 0:
                entry["problems"] += _differences(disturbed.seen, expected)
            elif entry["ended"]:
                entry["problems"].append(f"exit code {code}")
            condemned = (disturbed.seen / "checkpoints").glob("damaged-*")
            entry["problems"] += [f"condemned: {path.name}" for path in condemned]
            log.write_text(json.dumps(runs, indent=1) + "\n")
    return [problem for one in runs for problem in one["problems"]]


def _differences(folder: Path, expected: Path) -> list[str]:
    problems = []
    pairs = zip(untimed(metrics(folder)), untimed(metrics(expected)), strict=False)
    for found, wanted in pairs:
        # how often a judge was asked again is what disturbed the run, and no result of it
        names = [n for n in wanted if found.get(n) != wanted[n] and not n.endswith("/retries")]
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
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--budget_s", type=float, default=1e9)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), help="kinds of faults")
    parser.add_argument("--fuse", default=sys.executable, help="a Python that has mfusepy")
    arguments = parser.parse_args()
    chosen = [
        *islice(cycle(arguments.targets), arguments.kills),
        *islice(cycle(arguments.kinds), arguments.faults),
    ]
    random.Random(0).shuffle(chosen)
    with ExitStack() as stack:
        below = None
        if arguments.faults:
            below = stack.enter_context(closing(Infrastructure(arguments.folder, arguments.fuse)))
        found = campaign(
            arguments.folder,
            targets=chosen,
            budget_s=arguments.budget_s,
            how=signal.Signals[arguments.signal],
            infrastructure=below,
        )
    print(table(arguments.folder / "kills.json"))
    sys.exit(1 if found else 0)
