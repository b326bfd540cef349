"""Whole runs through the command line: their files, stops, kills and resumes."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megadapo.cluster.process_log import driver_log
from megadapo.codec import encode
from megadapo.errors import InfraError, RunInterruptedError
from megadapo.observe.metrics.names import METRIC_NAMES, OWN_AREAS
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.rollout.journal.journal import DIGEST_BYTES
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from megadapo.rollout.pool.handle import MAX_RESTARTS
from megadapo.run.state.status import read_status
from tests.support.rollout.groups import payloads
from tests.support.runs.whole_runs import (
    NUM_STEPS,
    assert_same_metrics,
    descendants,
    metrics,
    run,
    run_killed_at,
    start,
    untimed,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.timeout(600)


def test_run_writes_its_files_and_its_oracles_hold(uninterrupted):
    records = metrics(uninterrupted)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for record in records:
        names = list(record)
        assert names[: len(METRIC_NAMES)] == list(METRIC_NAMES)
        assert all(name.startswith(OWN_AREAS) for name in names[len(METRIC_NAMES) :])
        assert 0.0 < record["policy/positive_share_in_logits"] < 1.0
        assert record["reflection/response_share"] == record["reflection/wait"] == 0.0
        assert record["groups/kept"] == 8
        assert record["policy/skipped_updates"] == 0
        assert record["policy/ratio_first_max_error"] == 0.0
        assert record["parity/logprob_abs_max"] < 1e-4
    assert [r["eval/accuracy"] is not None for r in records] == [False, True, False, True]
    for name in ("config.json", "log.txt", "plot.png", "checkpoints/step-4/manifest.json"):
        assert (uninterrupted / name).stat().st_size > 0, name
    assert list((uninterrupted / "tensorboard").iterdir())


def test_saved_rollouts_match_their_update(uninterrupted):
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


@pytest.mark.full
def test_finished_run_starts_nothing(uninterrupted):
    start = time.monotonic()
    assert "before and after" in run(uninterrupted).stdout
    assert time.monotonic() - start < 30
    assert len(metrics(uninterrupted)) == NUM_STEPS


def decided_groups(folder: Path, step: int) -> list[dict]:
    """Saved groups without the second opinion, for which nothing waits: it may come too late."""
    groups = [encode(group, readable=True) for group in read_rollouts(rollouts_path(folder, step))]
    for group in groups:
        for response in group["responses"]:
            del response["symbolic_correct"]
    return groups


AWAY = ('--trainer.offload=["optimizer", "gradients", "parameters"]',)


@pytest.mark.fault
@pytest.mark.slow
def test_killed_and_stopped_run_equals_uninterrupted(uninterrupted, tmp_path):
    """All state comes back, with all offloaded, and no group of the journal is generated again."""
    folder = tmp_path / "stopped"
    process = start(folder, "--restarts=2", *AWAY)
    journal = folder / JOURNAL_FOLDER / "version-1.log"
    wait_until(lambda: journal.exists() and len(orders_in(journal)) >= 3, process)
    os.kill(read_status(folder).pid, signal.SIGKILL)
    shutil.copytree(folder / JOURNAL_FOLDER, tmp_path / "journal")
    wait_for_step(process, folder, 3)
    # as `timeout` and systemd do: Ray's daemons may not get it
    os.killpg(read_status(folder).pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "SIGKILL after step" in output
    assert f"ended with exit code {RunInterruptedError.exit_code} after step" in output
    assert "SIGTERM" in output and "resuming after step" in output
    assert descendants(folder) == []
    assert_same_metrics(folder, uninterrupted)
    for step in range(1, NUM_STEPS + 1):
        assert decided_groups(folder, step) == decided_groups(uninterrupted, step)
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
    last = (folder / "log.txt").read_text().splitlines()[-1]
    assert last.endswith(f"end: state=finished step={NUM_STEPS}/{NUM_STEPS} checkpoint={NUM_STEPS}")


def orders_in(path: Path) -> list[int]:
    """Return the prompt indices of the groups in a journal that may be in use."""
    groups = [json.loads(payload[DIGEST_BYTES:]) for payload in payloads(path)[1:]]
    return [group["prompt_index"] for group in groups]


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("seconds", [1.0, 8.0, 14.0, 20.0])
def test_stop_during_start_ends_the_run_at_once(tmp_path, seconds):
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
@pytest.mark.parametrize("placement", ["interleaved", "engine"])
def test_killed_run_with_background_evaluation_resumes_the_same(uninterrupted, tmp_path, placement):
    """Seeds, batches or weights that an evaluation touches would show in the metrics after it.

    The killed step 3 is redone; an engine of its own may still evaluate step 2 then.
    """
    folder = tmp_path / placement
    beside = (f"--evaluation.placement={placement}", "--cluster.placement=separate")
    run_killed_at(3, folder, *beside)
    assert "resuming after step 2" in run(folder, *beside).stdout
    assert read_evaluations(folder) == read_evaluations(uninterrupted)
    if placement == "interleaved":
        assert [r["eval/policy_version"] for r in metrics(folder)] == [0, None, 2, 4]
    assert without_evaluations(folder) == without_evaluations(uninterrupted)
    assert list(folder.glob("evaluation-*.log")) == []


LONG = (
    "--data.held_out=arithmetic:held_out:64",
    "--evaluation.samples_per_problem=64",
    "--checkpoint.every=1",
    "--checkpoint.keep=2",
)
"""Settings with which an evaluation takes several steps, each of them saved."""


@pytest.mark.full
@pytest.mark.fault
def test_reserved_engine_scores_older_weights_after_kills(tmp_path):
    """The engine is killed in the evaluation of step 0, the run after step 3, in the next one."""
    alone, folder = tmp_path / "alone", tmp_path / "engine"
    own = (*LONG, "--evaluation.placement=engine", "--cluster.placement=separate")
    run(alone, *LONG)
    process = start(folder, *own)
    wait_for_step(process, folder, 1)
    (pid,) = writers_of(folder / "logs" / "engine-1.log", folder)
    os.kill(pid, signal.SIGKILL)
    wait_until((folder / "checkpoints/step-3/manifest.json").exists, process)
    process.kill()
    process.communicate(timeout=60)
    assert [evaluation.step for evaluation in read_evaluations(folder)] == [0]
    assert "restart 1 of 3" in (folder / "log.txt").read_text()
    assert "resuming after step 3" in run(folder, *own).stdout
    assert read_evaluations(folder) == read_evaluations(alone)
    assert without_evaluations(folder) == without_evaluations(alone)
    assert list(folder.glob("evaluation-*.log")) == []
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-4"}


def writers_of(log: Path, folder: Path) -> list[int]:
    """Return the pids of actors that write a log file; vLLM's processes write it too."""
    return [
        pid
        for pid, name in descendants(folder)
        if name.startswith("ray::") and (Path("/proc") / str(pid) / "fd" / "1").resolve() == log
    ]


def without_evaluations(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith("eval/")}
        for record in untimed(metrics(folder))
    ]


@pytest.mark.full
@pytest.mark.fault
def test_hung_rank_ends_the_run_in_time(uninterrupted, tmp_path):
    folder = tmp_path / "hung"
    deadlines = (
        "--trainer.timeout_s=45",
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
    run(folder)
    assert_same_metrics(folder, uninterrupted)


@pytest.mark.full
@pytest.mark.fault
def test_run_without_engine_saves_its_last_step(uninterrupted, tmp_path):
    folder = tmp_path / "engineless"
    process = start(folder, "--checkpoint.every=4")
    wait_for_step(process, folder, 1)
    log, killed = folder / "logs" / "engine-0.log", set[int]()
    # each start of the engine dies, until it has no restart left
    while len(killed) <= MAX_RESTARTS:
        wait_until(lambda: set(writers_of(log, folder)) - killed, process)
        for pid in set(writers_of(log, folder)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == InfraError.exit_code, output
    done = len(metrics(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done}"]
    assert f"resuming after step {done}" in run(folder).stdout
    assert_same_metrics(folder, uninterrupted)


def state(folder):
    path = folder / "status.json"
    return read_status(folder).state if path.exists() else None


@pytest.mark.full
@pytest.mark.fault
def test_supervised_run_answers_requests(tmp_path):
    """Kills while it starts are no restarts; a stop file may be for a pause or for good."""
    folder = tmp_path / "run"
    rare = ("--evaluation.every=0", "--checkpoint.every=100")
    process = start(folder, "--restarts=1", "--run.num_steps=200", *rare)
    for _ in range(2):
        wait_until(lambda: state(folder) == "running", process)
        os.kill(read_status(folder).pid, signal.SIGKILL)
        wait_until(lambda: state(folder) == "waiting", process)
        assert read_status(folder).reason == "SIGKILL"
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: list((folder / "checkpoints").glob("step-*")), process)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: read_evaluations(folder), process)
    os.kill(read_status(folder).pid, signal.SIGQUIT)
    wait_until(lambda: "most recent call first" in driver_log(folder).read_text(), process)

    (folder / "stop").write_text("restart: a node ends")
    wait_until(lambda: state(folder) == "waiting", process)
    saved = read_status(folder).checkpoint_step
    assert saved == read_status(folder).step > 0
    wait_for_step(process, folder, saved + 1)
    (folder / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == RunInterruptedError.exit_code, output
    status = read_status(folder)
    assert (status.state, status.checkpoint_step) == ("stopped", status.step)
    assert "restart 1 of 1" in output and "not restarting: it was asked to stop" in output
    assert descendants(folder) == []
