"""Helpers of tests of whole runs: starting them, finding their processes, reading metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support import REPOSITORY

NUM_STEPS = 4
SMALL = [
    "--rollout.num_engines=1",
    "--rollout.num_threads=2",
    "--sampling.prompts_per_step=8",
    "--algorithm.responses_per_mini_batch=32",
    "--evaluation.max_problems=8",
    "--evaluation.every=2",
    "--checkpoint.every=2",
]
TIMED = (
    "time/", "tokens_per_s", "rollout/", "groups/stopped", "groups/dropped", "tokens/stopped",
    "weights/", "groups/from_journal", "memory/",
)  # fmt: skip
"""Beginnings of the names of metrics that depend on the engines' speed, on what they had, or on
what processes hold."""


def command(folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> list[str]:
    # a run may not be shorter than its warm-up
    warmup = f"--trainer.optimizer.warmup_steps={min(NUM_STEPS, num_steps)}"
    return [
        *(sys.executable, "-m", "megadapo.cli", "train", "configs/quickstart.toml"),
        *(f"--run.folder={folder}", f"--run.num_steps={num_steps}", warmup, *SMALL, *overrides),
    ]


def run(folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, *overrides, num_steps=num_steps),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )


def marked(folder: Path) -> dict[str, str]:
    """Return an environment that marks all processes of a run, under any name."""
    return {**os.environ, "RUN_UNDER_TEST": str(folder)}


def descendants(folder: Path) -> list[tuple[int, str]]:
    """Process number and command line of every living process that descends from the run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_UNDER_TEST={folder}\0".encode() in (process / "environ").read_bytes():
                name = (process / "cmdline").read_text(errors="replace")
                found.append((int(process.name), name))
        except OSError:
            continue  # it has just ended
    return found


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in records]


def with_traps(environment: dict[str, str], points: Path) -> dict[str, str]:
    """The environment of a run whose processes kill themselves: tests/support/injected."""
    paths = [str(REPOSITORY / "tests/support/injected"), environment.get("PYTHONPATH", "")]
    traps = {"KILL_AT": str(points), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**environment, **traps}


def start(folder: Path, *overrides: str, points: Path | None = None) -> subprocess.Popen:
    """Start or resume the run in the background.

    `points`: folder of those where a process kills itself, as `with_traps` says.
    """
    environment = marked(folder)
    return subprocess.Popen(
        command(folder, *overrides),
        cwd=REPOSITORY,
        env=environment if points is None else with_traps(environment, points),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Wait until the metrics of `step` are on disk."""
    path = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within five minutes"
        time.sleep(0.05)
