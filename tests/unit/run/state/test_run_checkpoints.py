"""The checkpoints of a run: resume, save, prune, fall back."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megadapo.errors import CheckpointError, CorruptCheckpointError, InfraError, RunInterruptedError
from megadapo.observe.metrics.records import read_metrics
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from megadapo.run.run import Run
from megadapo.run.state import run_checkpoints
from megadapo.run.state.checkpoint import EVALUATING, CheckpointStore
from megadapo.run.state.status import read_status
from tests.support.runs.checkpoints import write_shard, written_by
from tests.support.runs.runs_alone import (
    advance,
    config_of,
    open_and_close,
    record_step,
    saved_steps,
)


def test_damaged_newest_checkpoint_is_skipped(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 4)
    shard = tmp_path / "checkpoints" / "step-4" / "trainer" / "shard"
    shard.write_bytes(b"damaged")
    with Run.open(config_of(tmp_path)) as run:
        assert run.step == 2
        advance(run, 4)
    log = (tmp_path / "log.txt").read_text()
    assert "skipped" in log and "shard has 7 of 5 bytes" in log and "resuming after step 2" in log
    newest, _ = CheckpointStore(tmp_path / "checkpoints", keep=2).newest()
    assert newest is not None and newest.step == 4


def found_damaged(run: Run) -> None:
    run.fall_back(CorruptCheckpointError(f"{run.checkpoints.current.path}: shard is damaged"))


def test_run_falls_back_from_checkpoint_found_damaged(tmp_path):
    """Opening the run again would count a restart and miss that its samples follow another rule."""
    saves = {"checkpoint": {"every": 1, "keep": 3}}
    with Run.open(config_of(tmp_path, saves)) as run:
        for step in (1, 2, 3):
            record_step(run, step)
            run.complete(step, {"sampler": {"reserve": ["a group"], "step": step}})
            run.save(write_shard, wait=True)
    changed = config_of(tmp_path, {**saves, "reward.rule": "boxed"})
    with Run.open(changed, accept_changes=["reward.rule"]) as run:
        found_damaged(run)
        found_damaged(run)
        assert (run.step, [r["step"] for r in run.log.records]) == (1, [1])
        assert run.checkpoints.current.state["sampler"]["reserve"]["open"] == {}
        status = read_status(tmp_path)
        assert (status.restarts, status.step, status.resumed_from) == (1, 1, 1)
        advance(run, 2)
        with pytest.raises(CorruptCheckpointError):
            found_damaged(run)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    log = (tmp_path / "log.txt").read_text()
    assert "step-3: shard is damaged" in log and "step-2: shard is damaged" in log
    assert log.count("resuming after step") == 3


def test_earlier_checkpoint_accepts_the_same_changes(tmp_path):
    """Rows that were replaced under the same name would be refused after all."""
    with Run.open(config_of(tmp_path, {"checkpoint.every": 1})) as run:
        advance(run, 2)
    with Run.open(config_of(tmp_path), accept_changes=["data.train"]) as run:
        found_damaged(run)
        assert (run.step, run.checkpoints.current.accepts_other_data) == (1, True)


def test_run_ends_if_every_checkpoint_is_damaged(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
    unusable = pytest.raises(CheckpointError, match="no checkpoint of this run can be used")
    with unusable, Run.open(config_of(tmp_path)) as run:
        found_damaged(run)


def test_requeued_command_resumes_from_newer_checkpoint(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 4)
    path = tmp_path / "checkpoints" / "step-2"
    named = config_of(tmp_path, num_steps=9, resume=f"{tmp_path}/checkpoints/../checkpoints/step-2")
    with Run.open(named) as run:
        assert run.step == 2
        record_step(run, 3)
    with Run.open(named) as run:
        # step 3 was not saved, so there is nothing later to go on from
        assert run.step == 2
        advance(run, 8)
    assert saved_steps(tmp_path)[1:] == ["step-2", "step-6", "step-8"]
    with Run.open(named) as run:
        assert run.step == 8
    assert "delete" in (tmp_path / "log.txt").read_text()
    (tmp_path / "resumed.json").unlink()
    with Run.open(named) as run:
        assert run.step == 2
    with Run.open(config_of(tmp_path, resume=str(path.with_name("step-2")))) as run:
        assert run.step == 2


def test_target_of_another_run_is_used_once(tmp_path):
    other, own = config_of(tmp_path / "other"), tmp_path / "own"
    with Run.open(other) as run:
        advance(run, 2)
    with Run.open(config_of(own)) as run:
        advance(run, 4)
    source = tmp_path / "other" / "checkpoints" / "step-2"
    named = config_of(own, resume=str(source))
    with Run.open(named) as run:
        assert (run.step, run.checkpoints.current.path) == (2, source)
        advance(run, 4)
    shutil.rmtree(source)
    with Run.open(named) as run:
        assert run.step == 4
        with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
            found_damaged(run)


@pytest.mark.parametrize("name", ["missing", "a-file"])
def test_missing_target_is_one_message(tmp_path, name):
    (tmp_path / "a-file").touch()
    with pytest.raises(CheckpointError, match=rf"run\.resume = .*{name}: there is no such"):
        open_and_close(config_of(tmp_path / "run", resume=str(tmp_path / name)))


def test_damaged_target_changes_nothing(tmp_path):
    """Later checkpoints were set aside for it, so the next plain start had none."""
    with Run.open(config_of(tmp_path, {"checkpoint.every": 1, "checkpoint.keep": 9})) as run:
        advance(run, 4)
    before, target = saved_steps(tmp_path), tmp_path / "checkpoints" / "step-2"
    shard = target / "trainer" / "shard"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CorruptCheckpointError):
        open_and_close(config_of(tmp_path, resume=str(target)))
    assert saved_steps(tmp_path) == before
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_checkpoint_under_evaluation_is_kept(tmp_path):
    with Run.open(config_of(tmp_path, {"checkpoint": {"every": 1, "keep": 2}})) as run:
        for step in run.steps():
            record_step(run, step)
            run.complete(step, {EVALUATING: 2} if step in (3, 4) else {})
            run.save(write_shard, wait=True)
            others = {step - 1, 2} if step in (3, 4) else {step - 1} - {0}
            assert saved_steps(tmp_path) == [f"step-{one}" for one in sorted(others | {step})]


def test_journal_is_kept_until_the_next_commit(tmp_path):
    journal = tmp_path / JOURNAL_FOLDER
    journal.mkdir()
    for version in range(4):
        (journal / f"version-{version}.log").touch()
    with Run.open(config_of(tmp_path)) as run:
        record_step(run, 2)
        run.save(fails)
        run.checkpoints.settle()
        assert len(list(journal.iterdir())) == 4
        record_step(run, 3)
        run.save(write_shard)
        run.checkpoints.settle()
        assert [path.name for path in journal.iterdir()] == ["version-3.log"]


def fails(folder: Path) -> Any:
    (folder / "shard").write_bytes(b"half a sha")
    raise CheckpointError("rank 1: no space left on device")


def test_failed_save_is_repeated(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 3, lambda step: fails if step == 2 else write_shard)
    log = (tmp_path / "log.txt").read_text()
    assert "checkpoint of step 2" in log and "rank 1: no space left" in log and "tried again" in log
    assert saved_steps(tmp_path) == ["step-3"]


@pytest.mark.parametrize(
    "target", ["run_checkpoints.pinned_steps", "CheckpointStore.low_space", "CheckpointStore.prune"]
)
def test_folder_that_fails_beside_a_save_ends_no_run(tmp_path, monkeypatch, target):
    """A file server that is away for a minute; none of this is part of a checkpoint."""
    owner, name = target.split(".")
    owner = {"run_checkpoints": run_checkpoints, "CheckpointStore": CheckpointStore}[owner]
    real, calls = getattr(owner, name), []

    def fails_once(*arguments):
        calls.append(name)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(owner, name, fails_once)
    with Run.open(config_of(tmp_path, {"checkpoint.every": 1})) as run:
        advance(run, 3)
    assert len(calls) > 1 and saved_steps(tmp_path)[-1] == "step-3"


def test_saves_that_fail_for_long_end_the_run(tmp_path, monkeypatch):
    """A file server that is away for two steps does not; a supervisor restarts after the end."""
    monkeypatch.setattr(run_checkpoints, "FAILING_S", 0.05)
    with (
        pytest.raises(InfraError, match="rank 1: no space"),
        Run.open(config_of(tmp_path, num_steps=99)) as run,
    ):
        advance(run, 5, lambda step: write_shard if step < 3 else fails)
        time.sleep(0.1)
        advance(run, 9, lambda step: fails)
    assert run.step == 5
    assert saved_steps(tmp_path) == ["step-2"]


def test_transient_error_of_a_rank_keeps_the_checkpoint(tmp_path):
    """Only CorruptCheckpointError falls back: the same checkpoint is read after a restart."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 4)
    with pytest.raises(InfraError), Run.open(config_of(tmp_path)) as run:
        raise InfraError("shard cannot be read on node a")
    assert saved_steps(tmp_path) == ["step-2", "step-4"]


@pytest.mark.parametrize("kind", ["missing", "broken link"])
def test_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path, kind):
    """Its metrics and rollouts were deleted, without a word."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 3)
    moved = (tmp_path / "checkpoints").rename(tmp_path / "moved")
    if kind == "broken link":
        (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step 2 was saved, but .*is its disk mounted"):
            open_and_close(config_of(tmp_path))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    (tmp_path / "checkpoints").unlink(missing_ok=True)
    moved.rename(tmp_path / "checkpoints")
    with Run.open(config_of(tmp_path)) as run:
        assert run.step == 2


def test_low_disk_space_names_what_can_be_deleted(tmp_path, monkeypatch):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        aside = run.folder / "checkpoints" / "aside-step-1-abcd"
        aside.mkdir()
        (aside / "shard").write_bytes(b"x" * 1000)
        run.complete(3, {})
        run.save(write_shard, num_bytes=1 << 50, wait=False)
        run.checkpoints.settle()
    log = (tmp_path / "log.txt").read_text()
    assert "are free" in log and "continues without checkpoints/aside-* (0.00 GiB)" in log


def test_training_continues_during_a_save(tmp_path):
    written = threading.Event()

    def slow(folder: Path) -> Any:
        files = write_shard(folder)
        return lambda: files() if written.wait(20) else {}

    with Run.open(config_of(tmp_path)) as run:
        advance(run, 3, lambda step: slow)
        assert saved_steps(tmp_path)[0].startswith("tmp-step-2")
        written.set()
    assert saved_steps(tmp_path) == ["step-2"]
    manifest = json.loads((tmp_path / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert manifest["policy_version"] == 2
    assert manifest["config"]["run"]["num_steps"] == 5 and "torch" in manifest["versions"]


def test_long_updates_save_every_step_and_are_interrupted(tmp_path):
    config = config_of(tmp_path, {"checkpoint.every": 100}, grace_s=0.2)
    with pytest.raises(RunInterruptedError, match="s more, and"), Run.open(config) as run:
        for step in run.steps():
            with run.phase("train"):
                time.sleep(0.3 if step == 2 else 0.0)
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(20)
            record_step(run, step)
            if run.checkpoints.is_due(step):
                run.save(write_shard)
    assert saved_steps(tmp_path) == ["step-2", "step-3"]


def test_interrupted_run_saves_its_last_step_once(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        run.save(lambda folder: pytest.fail("step 2 is saved already"))
    with Run.open(config_of(tmp_path)) as run:
        run.save(lambda folder: pytest.fail("step 2 is what the run resumed from"))
        advance(run, 3)
        run.save(written_by(lambda folder: (folder / "shard").write_bytes(b"3")))
    assert saved_steps(tmp_path) == ["step-2", "step-3"]
