"""Whole runs that lose an engine in a weight update, an evaluation and a rollout."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megadapo.observe.metrics.records import read_evaluations
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from tests.support.rollout.groups import payloads
from tests.support.runs.whole_runs import (
    assert_same_metrics,
    descendants,
    metrics,
    start,
    wait_for_step,
    wait_until,
)

MANY_BUCKETS = (
    "--weights.bucket_mib=0.004",
    "--weights.deadline_s=15",
    "--trainer.timeout_s=180",
    "--rollout.engine_progress_timeout_s=60",
)
"""Options that make an update take seconds, in hundreds of rounds."""

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]


def processes_named(folder: Path, name: str) -> list[int]:
    return [pid for pid, title in descendants(folder) if name in title]


def wait_for_the_middle_of_an_update(process: subprocess.Popen, sender: int) -> None:
    """Wait until the sender's bucket has been filled several times.

    Its shared memory has no name any more, but is visible in the process's memory map.
    """
    (mapping,) = [
        line for line in Path(f"/proc/{sender}/maps").read_text().splitlines()
        if "megadapo-weights-" in line
    ]  # fmt: skip
    first, last = (int(end, 16) for end in mapping.split()[0].split("-"))
    seen = set()
    with open(f"/proc/{sender}/mem", "rb", buffering=0) as memory:

        def fills() -> int:
            memory.seek(first)
            seen.add(memory.read(last - first))
            return len(seen)

        wait_until(lambda: fills() >= 5, process)


FEW_AT_ONCE = (
    # so the run waits for all engines
    "--cluster.placement=separate",
    "--rollout.num_engines=3",
    "--rollout.max_num_seqs=2",
    "--rollout.engine_progress_timeout_s=20",
)
"""Options that make a rollout or an evaluation take seconds."""


def answered(folder: Path, step: int) -> int:
    """Return the number of answered problems of an evaluation in progress."""
    path = journal_path(folder, EVALUATION, step)
    return max(0, len(payloads(path)) - 1) if path.exists() else 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_run_that_loses_three_engines_has_same_metrics(uninterrupted, tmp_path, how):
    """One is lost in an update, one in an evaluation, one in a rollout; limits differ too."""
    folder = tmp_path / "run"
    process = start(folder, *MANY_BUCKETS, *FEW_AT_ONCE)
    wait_until(lambda: [one.step for one in read_evaluations(folder)] == [0], process)
    first, second, third = processes_named(folder, "VLLM::EngineCore")
    wait_for_the_middle_of_an_update(process, *processes_named(folder, "TrainerWorker"))
    os.kill(first, how)
    assert metrics_so_far(folder) == 0

    wait_until(lambda: answered(folder, 2), process)
    os.kill(second, how)
    assert answered(folder, 2) < 8 and metrics_so_far(folder) == 1

    wait_for_step(process, folder, 3)
    time.sleep(0.5)
    os.kill(third, how)
    assert metrics_so_far(folder) == 3

    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    # each engine has its own count
    assert " ".join(output.split()).count("restart 1 of 3") == 3, output
    assert_same_metrics(folder, uninterrupted)
    assert read_evaluations(folder) == read_evaluations(uninterrupted)
    assert descendants(folder) == []


def metrics_so_far(folder: Path) -> int:
    """Return the number of recorded steps."""
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
