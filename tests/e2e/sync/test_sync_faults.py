"""Whole runs whose trainer or engine is killed or stopped during a weight update."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megadapo.errors import InfraError
from megadapo.observe.metrics.records import read_evaluations
from megadapo.rollout.journal.journal import evaluation_journal_path
from tests.support.rollout.groups import num_results
from tests.support.runs.whole_runs import descendants, metrics, run, start, untimed, wait_for_step

DEADLINE_S = 15
MANY_BUCKETS = (
    "--weights.bucket_mib=0.004",
    f"--weights.deadline_s={DEADLINE_S}",
    "--trainer.timeout_s=60",
    "--trainer.progress_timeout_s=60",
    "--rollout.engine_progress_timeout_s=60",
)
"""Options that make an update take seconds, in hundreds of rounds."""
SENDER, RECEIVER = "TrainerWorker", "VLLM::EngineCore"

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]


def process_named(folder: Path, name: str) -> int:
    (pid,) = processes_named(folder, name)
    return pid


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
    seen, deadline = set(), time.monotonic() + 120
    with open(f"/proc/{sender}/mem", "rb", buffering=0) as memory:
        while len(seen) < 30:
            memory.seek(first)
            seen.add(memory.read(last - first))
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no weight update within two minutes"
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, r"trainer rank 0 died"),
        (signal.SIGSTOP, rf"trainer rank 0 did not finish .* within {DEADLINE_S} s"),
    ],
    ids=["killed", "stopped"],
)
def test_run_names_lost_sender_and_resumes(uninterrupted, tmp_path, how, message):
    """Catches an update that waits forever, an error without the process's name, processes that
    outlive the run, and a resumed run that starts from half an update."""
    folder = tmp_path / "run"
    process = start(folder, *MANY_BUCKETS)
    wait_for_step(process, folder, 2)
    sender = process_named(folder, SENDER)
    wait_for_the_middle_of_an_update(process, sender)
    os.kill(sender, how)
    struck = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == InfraError.exit_code, output
    assert time.monotonic() - struck < DEADLINE_S + 45
    found = re.search(rf"weights: bucket (\d+) of (\d+): {message}", output)
    assert found, output
    assert 0 < int(found[1]) < int(found[2])
    assert descendants(folder) == []
    # the third step, whose update failed, is repeated by the resumed run
    assert len(metrics(folder)) == 3

    result = run(folder, *MANY_BUCKETS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step 2" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


FEW_AT_ONCE = (
    "--rollout.num_engines=3",
    "--rollout.max_num_seqs=2",
    "--rollout.engine_progress_timeout_s=20",
)
"""Options that make a rollout or an evaluation take seconds."""


def wait_for_the_middle_of_an_evaluation(process: subprocess.Popen, folder: Path, step: int) -> int:
    """Wait for the first answered problem; return the number of answered ones."""
    path, deadline = evaluation_journal_path(folder, step), time.monotonic() + 120
    while not path.exists() or not path.stat().st_size:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no evaluation within two minutes"
        time.sleep(0.005)
    return num_results(path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_run_that_loses_three_engines_has_same_metrics(uninterrupted, tmp_path, how):
    """Lose one engine in the update after step 1, one in the evaluation after step 2, and one in
    the rollout of step 4. The run to compare with has one engine and other limits."""
    folder = tmp_path / "run"
    process = start(folder, *MANY_BUCKETS, *FEW_AT_ONCE)
    wait_for_evaluation(process, folder, 0)
    first, second, third = processes_named(folder, RECEIVER)
    wait_for_the_middle_of_an_update(process, process_named(folder, SENDER))
    os.kill(first, how)
    assert metrics_so_far(folder) == 0

    num_answered = wait_for_the_middle_of_an_evaluation(process, folder, 2)
    os.kill(second, how)
    assert num_answered < 8 and metrics_so_far(folder) == 1

    wait_for_step(process, folder, 3)
    time.sleep(0.5)
    os.kill(third, how)
    assert metrics_so_far(folder) == 3

    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    for number in (1, 2, 3):
        assert f"restart {number} of 3" in " ".join(output.split()), output
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))
    assert read_evaluations(folder) == read_evaluations(uninterrupted)
    assert descendants(folder) == []


def wait_for_evaluation(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not any(one.step == step for one in read_evaluations(folder)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no evaluation within five minutes"
        time.sleep(0.05)


def metrics_so_far(folder: Path) -> int:
    """Return the number of recorded steps."""
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
