"""Helpers of tests of whole runs: starting them, finding their processes, reading metrics."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY
from tests.support.processes import running

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
    "weights/", "groups/from_journal", "memory/", "train/slowest_rank",
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


def megadapo(
    *words: object, timeout: float = 500, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it; its exit code must be `code`."""
    result = subprocess.run(
        [sys.executable, "-m", "megadapo.cli", *map(str, words)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def run(
    folder: Path, *overrides: str, num_steps: int = NUM_STEPS, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Start or resume the run, and wait for its end."""
    return megadapo(*command(folder, *overrides, num_steps=num_steps)[3:], code=code)


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


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in records]


def start(folder: Path, *overrides: str, points: Path | None = None) -> subprocess.Popen[str]:
    """Start or resume the run in the background.

    `points`: folder of those where a process kills itself: tests/support/injected.
    """
    environment = marked(folder)
    if points is not None:
        paths = [str(REPOSITORY / "tests/support/injected"), environment.get("PYTHONPATH", "")]
        environment |= {
            "KILL_AT": str(points),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
    return start_command(command(folder, *overrides), environment)


def start_command(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command in the repository, with its output and errors in one pipe."""
    return subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_killed_at(step: int, folder: Path, *overrides: str) -> None:
    """Kill the driver when a step is recorded; all other processes must end by themselves."""
    process = start(folder, *overrides)
    wait_for_step(process, folder, step)
    process.kill()
    process.communicate(timeout=60)
    outlived = "processes outlive their driver"
    running.wait_until(lambda: not descendants(folder), timeout_s=45, message=outlived)


def assert_same_metrics(folder: Path, expected: Path) -> None:
    assert untimed(metrics(folder)) == untimed(metrics(expected))


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    path = folder / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= step, process)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for something that a running program does."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "not within five minutes"
        time.sleep(0.02)
