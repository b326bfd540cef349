"""Helpers of tests of whole runs: starting them, finding their processes, reading metrics."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megadapo.observe.metrics.names import is_repeated
from tests.support import REPOSITORY
from tests.support.processes import running

NUM_STEPS = 4
SMALL = [
    "--rollout.num_engines=1",
    "--rollout.num_threads=2",
    "--sampling.prompts_per_step=8",
    "--algorithm.responses_per_mini_batch=32",
    "--data.held_out=arithmetic:held_out:8",
    "--evaluation.every=2",
    "--checkpoint.every=2",
]


def command(
    folder: Path,
    *overrides: str,
    num_steps: int = NUM_STEPS,
    recipe: Path | str = "configs/quickstart.toml",
) -> list[str]:
    # a run may not be shorter than its warm-up
    warmup = f"--trainer.optimizer.warmup_steps={min(NUM_STEPS, num_steps)}"
    return [
        *(sys.executable, "-m", "megadapo.cli", "train", str(recipe)),
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
    folder: Path,
    *overrides: str,
    num_steps: int = NUM_STEPS,
    code: int = 0,
    recipe: Path | str = "configs/quickstart.toml",
) -> subprocess.CompletedProcess[str]:
    """Start or resume the run, and wait for its end."""
    words = command(folder, *overrides, num_steps=num_steps, recipe=recipe)
    return megadapo(*words[3:], code=code)


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
    return [{k: v for k, v in r.items() if is_repeated(k)} for r in records]


def start(folder: Path, *overrides: str, points: Path | None = None) -> subprocess.Popen[str]:
    """Start or resume the run in the background.

    `points`: folder of those where a process kills itself: tests/support/injected.
    """
    environment = marked(folder)
    if points is not None:
        environment |= injecting(KILL_AT=str(points))
    return start_command(command(folder, *overrides), environment)


def injecting(**faults: str) -> dict[str, str]:
    """Return the environment of a run with faults of tests/support/injected."""
    paths = [str(REPOSITORY / "tests/support/injected"), os.environ.get("PYTHONPATH", "")]
    return {**faults, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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


def weights(folder: Path, num_steps: int = NUM_STEPS) -> str:
    """Return the SHA-256 of weights and optimizer after the last step."""
    digest, parts = hashlib.sha256(), folder / "checkpoints" / f"step-{num_steps}" / "trainer"
    paths = sorted(parts.glob("*.distcp"))
    assert paths, f"{parts} has no weights"
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
