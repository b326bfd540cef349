"""Whole runs whose trainer or engine is killed or stopped in the middle of a weight update."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megadapo.errors import InfraError
from tests.support.whole_runs import descendants, metrics, run, start, untimed, wait_for_step

DEADLINE_S = 15
MANY_BUCKETS = (
    "--weights.bucket_mib=0.004",
    f"--weights.deadline_s={DEADLINE_S}",
    "--trainer.timeout_s=60",
    "--rollout.engine_progress_timeout_s=60",
)
"""An update then takes seconds, in hundreds of rounds, each of which has to be done in time."""
SENDER, RECEIVER = "TrainerWorker", "VLLM::EngineCore"

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]


def process_named(folder: Path, name: str) -> int:
    (pid,) = processes_named(folder, name)
    return pid


def processes_named(folder: Path, name: str) -> list[int]:
    return [pid for pid, title in descendants(folder) if name in title]


def wait_for_the_middle_of_an_update(process: subprocess.Popen, sender: int) -> None:
    """Wait until the sender's bucket has been filled anew a number of times.

    Its shared memory has no name any more, but it is still to be seen in the process.
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
def test_a_run_without_its_sender_ends_with_a_name_and_resumes(
    uninterrupted, tmp_path, how, message
):
    """Catches an update that waits for ever for one process, an error that does not say for which
    one, processes that outlive the run, and a resumed run that starts from half an update."""
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
    assert len(metrics(folder)) == 2

    result = run(folder, *MANY_BUCKETS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step 2" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_goes_on_without_its_receiver(uninterrupted, tmp_path, how):
    """One of three engines goes in the middle of an update: the metrics are those of a run that
    nothing disturbed, with one engine."""
    folder = tmp_path / "run"
    process = start(folder, *MANY_BUCKETS, "--rollout.num_engines=3")
    wait_for_step(process, folder, 2)
    victim = processes_named(folder, RECEIVER)[1]
    wait_for_the_middle_of_an_update(process, process_named(folder, SENDER))
    os.kill(victim, how)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "rollout engine" in output and "restart 1 of 3" in output.replace("\n", " ")
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))
    assert descendants(folder) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", [1, 2], ids=["in a rollout", "in an evaluation"])
def test_a_run_goes_on_without_an_engine_while_it_generates(uninterrupted, tmp_path, step, how):
    """After step 1 comes a rollout; at the end of step 2 an evaluation, whose record comes last."""
    folder = tmp_path / "run"
    limits = ("--rollout.engine_progress_timeout_s=20", "--rollout.num_engines=3")
    process = start(folder, *limits)
    wait_for_step(process, folder, step)
    os.kill(processes_named(folder, RECEIVER)[1], how)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "rollout engine" in output and "restart 1 of 3" in output.replace("\n", " ")
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))
