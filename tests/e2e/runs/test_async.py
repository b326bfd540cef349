"""Whole asynchronous runs: tokens of several versions, and the same run with other engines."""

import signal
from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import RunInterruptedError
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.run.state.status import read_status
from tests.support.runs.whole_runs import (
    assert_same_metrics,
    descendants,
    metrics,
    run,
    run_killed_at,
    start,
    wait_for_step,
    wait_until,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ASYNC = (
    "--sampling.mode=async",
    "--sampling.max_staleness=3",
    "--cluster.placement=separate",
    "--evaluation.every=0",
    "--observe.saved_groups=all",
    "--sampling.prompts_per_step=4",
    "--algorithm.responses_per_mini_batch=16",
    # one slot: the engines are slower than the trainer, so publications stop responses
    "--rollout.max_num_seqs=1",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async") / "first"
    run(folder, *ASYNC)
    return folder


def test_publications_stop_responses_and_none_is_too_old(first):
    mixed = 0
    for record in metrics(first):
        saved = list(read_rollouts(rollouts_path(first, record["step"])))
        trained = [group for group in saved if group.disposition == "trained"]
        assert record["groups/kept"] == len(trained) == 4
        assert record["groups/dropped"] == record["groups/stopped"] == 0
        versions = [one.response.policy_versions for group in trained for one in group.responses]
        ages = record["step"] - 1 - np.concatenate(versions)
        assert ages.min() >= 0 and ages.max() <= 3
        assert record["staleness/max"] == ages.max()
        assert record["policy/ratio_first_max_error"] == 0.0
        mixed += sum(len(np.unique(one)) > 1 for one in versions)
    assert mixed > 0, "no response was stopped by a publication"


@pytest.mark.full
def test_repeated_run_has_the_same_weights_with_other_engines(first, tmp_path):
    """tests/unit/rollout/sampling/test_schedule.py repeats schedules without processes."""
    folder = tmp_path / "second"
    other = ("--rollout.num_engines=2", "--rollout.max_num_seqs=8")
    out = run(folder, *ASYNC, *other, f"--schedule={first}").stdout
    assert f"repeating the schedule of {first}" in out
    assert_same_metrics(folder, first)
    assert weights(folder) == weights(first)
    assert (folder / "schedule.log").read_bytes() == (first / "schedule.log").read_bytes()


MANY_BUCKETS = "--weights.bucket_mib=0.004"
"""An option that makes an update take seconds, in hundreds of rounds."""


@pytest.mark.full
@pytest.mark.fault
def test_run_stopped_in_a_publication_resumes_to_what_its_own_schedule_says(tmp_path):
    """The step whose weights are on their way is saved, and its groups continue."""
    folder, repeated = tmp_path / "stopped", tmp_path / "repeated"
    process = start(folder, *ASYNC, MANY_BUCKETS)
    wait_for_step(process, folder, 2)
    # until then the status shows the publication after step 2
    wait_until(lambda: read_status(folder).phase == "train", process)
    wait_until(lambda: read_status(folder).phase == "sync", process)
    process.send_signal(signal.SIGTERM)
    assert len(metrics(folder)) == 2 and read_status(folder).phase == "sync"
    output, _ = process.communicate(timeout=120)
    assert process.returncode == RunInterruptedError.exit_code, output
    assert "SIGTERM" in output and descendants(folder) == []
    status = read_status(folder)
    assert (status.state, status.step, status.checkpoint_step) == ("stopped", 3, 3)

    assert "resuming after step 3" in run(folder, *ASYNC, MANY_BUCKETS).stdout
    run(repeated, *ASYNC, "--rollout.num_engines=2", f"--schedule={folder}")
    assert_same_metrics(repeated, folder)
    assert weights(repeated) == weights(folder)


@pytest.mark.full
def test_killed_run_resumes_to_what_its_own_schedule_says(tmp_path):
    killed, repeated = tmp_path / "killed", tmp_path / "repeated"
    run_killed_at(4, killed, *ASYNC)
    assert "resuming after step 2" in run(killed, *ASYNC).stdout
    run(repeated, *ASYNC, "--rollout.num_engines=2", f"--schedule={killed}")
    assert_same_metrics(repeated, killed)
    assert weights(repeated) == weights(killed)
