"""Whole runs through the command line: their files, stops, kills and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import InfraError, OracleError, RunInterruptedError
from megadapo.observe.metrics.names import METRIC_NAMES, OWN_AREAS
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.observe.rollouts.saved_group import encode_saved
from megadapo.rollout.journal.journal import DIGEST_BYTES, JOURNAL_FOLDER
from megadapo.rollout.journal.record_log import RecordLog
from megadapo.run.state.status import read_status
from tests.support.runs.whole_runs import (
    NUM_STEPS,
    descendants,
    metrics,
    run,
    start,
    untimed,
    wait_for_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_run_writes_its_files(uninterrupted):
    records = metrics(uninterrupted)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for record in records:
        names = list(record)
        assert names[: len(METRIC_NAMES)] == list(METRIC_NAMES)
        assert all(name.startswith(OWN_AREAS) for name in names[len(METRIC_NAMES) :])
        assert 0.0 < record["policy/positive_gradient_share"] < 1.0
        assert record["reflection/response_share"] == record["reflection/wait"] == 0.0
        assert record["groups/kept"] == 8
        assert record["policy/skipped_updates"] == 0
    assert [r["eval/accuracy"] is not None for r in records] == [False, True, False, True]
    for name in ("config.json", "log.txt", "plot.png", "checkpoints/step-4/manifest.json"):
        assert (uninterrupted / name).stat().st_size > 0, name
    assert list((uninterrupted / "tensorboard").iterdir())


def test_saved_rollouts_match_their_update(uninterrupted):
    """Saved log-probs belong to their token and update."""
    for record in metrics(uninterrupted):
        path = rollouts_path(uninterrupted, record["step"])
        groups = list(read_rollouts(path))
        assert len(groups) == 8
        trained = [group for group in groups if group.disposition == "trained"]
        assert trained
        for response in (response for group in groups for response in group.responses):
            assert "".join(response.tokens) == response.response.text
        for group in trained:
            for response in group.responses:
                gap = np.abs(response.logprobs_old - response.response.logprobs)
                assert group.from_reserve or gap.max() < 1e-4
                assert np.isfinite(response.logprobs_update).all()


def test_oracles_hold_on_every_step(uninterrupted):
    for record in metrics(uninterrupted):
        assert record["policy/ratio_first_max_error"] == 0.0
        assert record["parity/logprob_abs_max"] < 1e-4


def test_finished_run_starts_nothing(uninterrupted):
    start = time.monotonic()
    result = run(uninterrupted)
    assert result.returncode == 0, result.stderr
    assert "before and after" in result.stdout
    assert time.monotonic() - start < 30
    assert len(metrics(uninterrupted)) == NUM_STEPS


def decided_groups(folder: Path, step: int) -> list[dict]:
    """Saved groups without the second opinion, for which nothing waits: it may come too late."""
    groups = [encode_saved(group) for group in read_rollouts(rollouts_path(folder, step))]
    for group in groups:
        for response in group["responses"]:
            del response["symbolic_correct"]
    return groups


AWAY = ('--trainer.offload=["optimizer", "gradients", "parameters"]',)


@pytest.mark.fault
def test_killed_and_stopped_run_equals_uninterrupted(uninterrupted, tmp_path):
    """Weights, moments, learning rate, prompts, seeds and reserve must all come back, and no group
    that the journal has may be generated again.

    The driver is killed in the middle of a rollout, before there is a checkpoint, and later asked
    to stop as a scheduler does that needs the machine; its supervisor is not. All that the trainer
    holds is away while engines generate, which changes nothing either.
    """
    folder = tmp_path / "stopped"
    process = start(folder, "--restarts=2", *AWAY)
    wait_for_groups(process, folder, policy_version=1, num_groups=3)
    os.kill(read_status(folder).pid, signal.SIGKILL)
    shutil.copytree(folder / JOURNAL_FOLDER, tmp_path / "journal")
    wait_for_step(process, folder, 3)
    os.kill(read_status(folder).pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "SIGKILL after step" in output
    assert f"ended with exit code {RunInterruptedError.exit_code} after step" in output
    assert "SIGTERM" in output and "resuming after step" in output
    assert descendants(folder) == []
    assert_equal_runs(folder, uninterrupted)
    first, second = metrics(folder)[:2]
    num_asked = 0
    for record in (first, second):
        known = orders_in(tmp_path / "journal" / f"version-{record['step'] - 1}.log")
        num_asked += record["groups/sampled"]
        needed = sum(order < num_asked for order in known)
        assert needed <= record["groups/from_journal"] <= len(known)
    assert first["groups/from_journal"] >= first["groups/sampled"]
    assert first["rollout/engine_tokens_max"] == 0, "a whole step was in the journal"
    assert list((folder / JOURNAL_FOLDER).iterdir()) == []
    status = read_status(folder)
    assert (status.state, status.step, status.restarts) == ("finished", NUM_STEPS, 2)
    assert (
        (folder / "log.txt")
        .read_text()
        .splitlines()[-1]
        .endswith(f"end: state=finished step={NUM_STEPS}/{NUM_STEPS} checkpoint={NUM_STEPS}")
    )


def wait_for_groups(
    process: subprocess.Popen, folder: Path, *, policy_version: int, num_groups: int
) -> None:
    """Wait until the journal of a policy version has so many groups."""
    path = folder / JOURNAL_FOLDER / f"version-{policy_version}.log"
    deadline = time.monotonic() + 300
    while not path.exists() or len(orders_in(path)) < num_groups:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no group within five minutes"
        time.sleep(0.02)


def orders_in(path: Path) -> list[int]:
    """Return the prompt indices of the groups in a copy of a journal that may be in use."""
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    payloads: list[bytes] = []
    RecordLog(copy, lambda _, payload: payloads.append(payload)).close()
    copy.unlink()
    return [json.loads(payload[DIGEST_BYTES:])["group"]["prompt_index"] for payload in payloads[1:]]


@pytest.mark.full
def test_run_stopped_twice_equals_uninterrupted(uninterrupted, tmp_path):
    """Stop once before a checkpoint is due and once after a checkpoint of a resumed run."""
    folder = tmp_path / "stopped"
    for step in (1, 3):
        process = start(folder)
        wait_for_step(process, folder, step)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == RunInterruptedError.exit_code, output
        assert "SIGTERM" in output
        assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step" in result.stdout
    assert_equal_runs(folder, uninterrupted)


def assert_equal_runs(folder: Path, expected: Path) -> None:
    assert untimed(metrics(folder)) == untimed(metrics(expected))
    for step in range(1, NUM_STEPS + 1):
        assert decided_groups(folder, step) == decided_groups(expected, step)


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("seconds", [1.0, 8.0, 14.0, 20.0])
def test_stop_during_start_ends_the_run_at_once(tmp_path, seconds):
    """Before the first step there is no work to lose."""
    folder = tmp_path / "starting"
    process = start(folder)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (RunInterruptedError.exit_code, -signal.SIGTERM), output
    assert time.monotonic() - asked < 45
    assert descendants(folder) == []


@pytest.mark.full
@pytest.mark.fault
def test_killed_run_leaves_no_process(uninterrupted, tmp_path):
    """A surviving engine would keep its memory or GPU."""
    folder = tmp_path / "killed"
    process = start(folder)
    wait_for_step(process, folder, 3)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 45
    while descendants(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step 2" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("placement", ["interleaved", "engine"])
def test_background_evaluation_changes_no_metric(uninterrupted, tmp_path, placement):
    """Seeds, batches or weights that an evaluation touches would show in the metrics after it.

    The kill comes when step 3 is recorded, which has to be done again. With "interleaved" that has
    the evaluation of step 2; an engine of its own may still be at it.
    """
    folder = tmp_path / placement
    beside = (f"--evaluation.placement={placement}", "--cluster.placement=separate")
    process = start(folder, *beside)
    wait_for_step(process, folder, 3)
    process.kill()
    process.communicate(timeout=60)
    result = run(folder, *beside)
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_evaluations(folder) == read_evaluations(uninterrupted)
    if placement == "interleaved":
        assert [r["eval/policy_version"] for r in metrics(folder)] == [0, None, 2, 4]
    assert without_evaluations(folder) == without_evaluations(uninterrupted)
    assert list(folder.glob("evaluation-*.log")) == []


LONG = (
    "--evaluation.max_problems=64",
    "--evaluation.samples_per_problem=64",
    "--checkpoint.every=1",
    "--checkpoint.keep=2",
)
"""Settings with which an evaluation takes several steps, each of them saved."""


@pytest.mark.full
@pytest.mark.fault
def test_reserved_engine_scores_older_weights_after_kills(tmp_path):
    """Catches weights of another step, in an engine that comes back as in a run that does.

    The engine is killed with the weights of step 0 while others train on; the run is killed when it
    has saved step 3 and the weights of step 2 are still evaluated.
    """
    alone, folder = tmp_path / "alone", tmp_path / "engine"
    own = (*LONG, "--evaluation.placement=engine", "--cluster.placement=separate")
    result = run(alone, *LONG)
    assert result.returncode == 0, result.stdout + result.stderr
    process = start(folder, *own)
    wait_for_step(process, folder, 1)
    os.kill(writer_of(folder / "logs" / "engine-1.log", folder), signal.SIGKILL)
    while not (folder / "checkpoints/step-3/manifest.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert [evaluation.step for evaluation in read_evaluations(folder)] == [0]
    assert "restart 1 of 3" in (folder / "log.txt").read_text()
    result = run(folder, *own)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step 3" in result.stdout
    assert read_evaluations(folder) == read_evaluations(alone)
    assert without_evaluations(folder) == without_evaluations(alone)
    assert list(folder.glob("evaluation-*.log")) == []
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-4"}


def writer_of(log: Path, folder: Path) -> int:
    """Return the pid of the actor that writes a log file; vLLM's processes write it too."""
    (found,) = (
        pid
        for pid, name in descendants(folder)
        if name.startswith("ray::") and (Path("/proc") / str(pid) / "fd" / "1").resolve() == log
    )
    return found


def without_evaluations(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith("eval/")}
        for record in untimed(metrics(folder))
    ]


@pytest.mark.full
@pytest.mark.fault
def test_hung_rank_ends_the_run_in_time(uninterrupted, tmp_path):
    """A stopped process would block a wait without a deadline forever."""
    folder = tmp_path / "hung"
    deadlines = (
        "--trainer.timeout_s=15",
        "--trainer.progress_timeout_s=15",
        "--weights.deadline_s=15",
        "--rollout.engine_progress_timeout_s=30",
    )
    process = start(folder, *deadlines)
    wait_for_step(process, folder, 2)
    hung = [pid for pid, name in descendants(folder) if "TrainerWorker" in name]
    assert len(hung) == 1
    os.kill(hung[0], signal.SIGSTOP)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == InfraError.exit_code, output
    assert "trainer rank 0 sent no heartbeat for 15 s" in " ".join(output.split())
    assert "most recent call first" in (folder / "logs" / "trainer-rank-0.log").read_text()
    assert "trainer-rank-0.log" in (folder / "log.txt").read_text().splitlines()[-1]
    assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.fault
def test_run_without_engine_saves_its_last_step(uninterrupted, tmp_path):
    """Otherwise steps since the last checkpoint would be repeated."""
    folder = tmp_path / "engineless"
    process = start(folder, "--checkpoint.every=4", "--rollout.max_engine_restarts=0")
    wait_for_step(process, folder, 1)
    os.kill(writer_of(folder / "logs" / "engine-0.log", folder), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == InfraError.exit_code, output
    done = len(metrics(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done}"]
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resuming after step {done}" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.fault
def test_ranks_find_damaged_checkpoint(uninterrupted, tmp_path):
    """The driver checks names and sizes only; the ranks find a flipped byte."""
    folder = tmp_path / "damaged"
    shutil.copytree(uninterrupted, folder)
    shard = folder / "checkpoints" / "step-4" / "trainer" / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    result = run(folder, num_steps=5)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "__0_0.distcp is damaged" in result.stdout and "resuming after step 2" in result.stdout
    assert untimed(metrics(folder))[:4] == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.parametrize("second", ["pipeline", "context"])
def test_trainer_splits_run_by_overrides(uninterrupted, tmp_path, second):
    """TP 2 x PP 2 or CP 2 with sequence parallelism and two engines learn what one process learns.

    The first step's samples come from equal weights and seeds, so they are the same responses; its
    loss may differ by rounding only.
    """
    folder = tmp_path / "split"
    result = run(
        folder,
        "--trainer.tensor_parallel=2",
        f"--trainer.{second}_parallel=2",
        "--trainer.sequence_parallel=true",
        "--rollout.num_engines=2",
        "--rollout.num_threads=1",
        # half of the quickstart's, as the warm-up of so short a run is half of the other run's
        "--trainer.optimizer.lr=1.5e-5",
        num_steps=2,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (split, then), whole = metrics(folder), metrics(uninterrupted)[0]
    assert then["parity/logprob_abs_max"] < 1e-4  # the engines have what was trained
    assert split["policy/lr"] == whole["policy/lr"]
    assert split["response_length/mean"] == whole["response_length/mean"]
    assert split["accuracy/mean"] == whole["accuracy/mean"]
    assert split["policy/loss"] == pytest.approx(whole["policy/loss"], rel=1e-4, abs=1e-6)
    assert split["policy/entropy"] == pytest.approx(whole["policy/entropy"], rel=1e-5)


@pytest.mark.full
def test_engine_with_two_stages_samples_trained_weights(tmp_path):
    """Catches a stage that the plan, the slots or vLLM do not know of: the second step's log-probs
    come from weights that were trained and sent."""
    folder = tmp_path / "stages"
    result = run(folder, "--rollout.pipeline_parallel=2", num_steps=2)
    assert result.returncode == 0, result.stdout + result.stderr
    for record in metrics(folder):
        assert record["parity/logprob_abs_max"] < 1e-4
        assert record["policy/ratio_first_max_error"] == 0.0


@pytest.mark.full
def test_broken_oracle_has_its_exit_code(tmp_path):
    """A parity bound of 0 cannot hold between two programs; the step is saved."""
    result = run(tmp_path / "strict", "--oracles.logprob_abs_max=0.0", num_steps=2)
    assert result.returncode == OracleError.exit_code
    assert (tmp_path / "strict" / "checkpoints" / "step-00001").is_dir()
    assert "parity/logprob_abs_max" in result.stderr and "oracles.logprob_abs_max" in result.stderr
