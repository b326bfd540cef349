"""Where a run stands: fresh, resumed, refused; and what it evaluates and saves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megadapo.config import RunConfig, from_dict
from megadapo.config.sections import CheckpointConfig
from megadapo.errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    InfraError,
    RunInterrupted,
)
from megadapo.observe import rollouts
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics import EvaluationRecord, read_evaluations, read_metrics
from megadapo.rewards.config import RewardConfig
from megadapo.rollout.answer_log import answers_path
from megadapo.rollout.journal import JOURNAL_FOLDER
from megadapo.run.checkpoint import EVALUATING, CheckpointStore, WriteTrainer
from megadapo.run.run import Run
from megadapo.run.status import read_status
from tests.support.checkpoints import written_by
from tests.support.saved_groups import saved_group


def config_of(folder: Path, **run: object) -> RunConfig:
    return from_dict(
        {
            "run": {"folder": str(folder), "num_steps": 5, **run},
            "model": {"path": "somewhere"},
            "data": {"train": "arithmetic:train:64", "held_out": "arithmetic:held_out:8"},
            "evaluation": {"every": 2},
            "checkpoint": {"every": 2},
            "trainer": {"optimizer": {"warmup_steps": 2}},
        }
    )


def evaluation(step: int) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        policy_version=step,
        accuracy=0.5,
        standard_error=0.1,
        num_problems=8,
        samples_per_problem=8,
        response_length=9.0,
    )


def advance(run: Run, num_steps: int) -> None:
    """Do steps as the loop does them, with nothing behind them."""
    for step in run.steps():
        with run.phase("rollout"):
            pass
        run.log.record({"step": step, "tokens/generated": 10})
        run.complete(step, {"cursor": step})
        if run.checkpoints.is_due(step):
            run.save(written_by(lambda folder: (folder / "shard").write_bytes(b"shard")))
        if step == num_steps:
            return


def saved_steps(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_a_fresh_run_starts_at_step_one_and_saves_what_it_should(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        assert (run.step, run.checkpoints.current, run.finished) == (0, None, False)
        advance(run, 5)
        assert run.finished
    assert saved_steps(tmp_path) == ["step-4", "step-5"]
    assert json.loads((tmp_path / "config.json").read_text())["run"]["num_steps"] == 5


def test_a_resumed_run_drops_what_was_recorded_after_its_checkpoint(tmp_path):
    """Steps redone after a kill would otherwise be in the metrics twice."""
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation(0))
        advance(run, 3)
        run.log.record_evaluation(evaluation(3))
    with Run.open(config_of(tmp_path)) as run:
        assert run.step == 2
        assert run.checkpoints.current is not None and run.checkpoints.current.state == {
            "cursor": 2
        }
        assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
        assert [e.step for e in read_evaluations(tmp_path)] == [0]


def test_without_a_checkpoint_nothing_recorded_counts(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation(0))
        advance(run, 1)
    with Run.open(config_of(tmp_path)):
        assert read_metrics(tmp_path) == [] and read_evaluations(tmp_path) == []


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
    with pytest.raises(CheckpointError, match="run.folder"):
        Run.open(config_of(tmp_path, resume="never"))


def test_resuming_from_a_path_abandons_later_steps(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 5)
    path = tmp_path / "checkpoints" / "step-4"
    with Run.open(config_of(tmp_path, resume=str(path))) as run:
        assert run.step == 4
        advance(run, 5)
    assert "step-5" in saved_steps(tmp_path)
    assert any(name.startswith("aside-step-5") for name in saved_steps(tmp_path))


def test_a_damaged_newest_checkpoint_is_skipped_and_said(tmp_path):
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
    """What the ranks that read a checkpoint lead to."""
    run.fall_back(DamageError(f"{run.checkpoints.current.path}: shard is damaged"))


def test_a_checkpoint_that_its_readers_find_damaged_is_left_in_the_same_run(tmp_path):
    """Opened anew the run would count a restart, and forget that its samples are of another rule:
    the configuration in the folder is the new one by then."""
    config = config_of(tmp_path)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=1, keep=3)})
    with Run.open(config) as run:
        for step in (1, 2, 3):
            record_step(run, step)
            run.complete(step, {"sampler": {"reserve": ["a group"], "step": step}})
            write = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
            run.save(write, wait=True)
    changed = config.model_copy(update={"reward": RewardConfig(rule="boxed")})
    with Run.open(changed, accept_changes=True) as run:
        found_damaged(run)
        found_damaged(run)
        assert (run.step, [r["step"] for r in run.log.records]) == (1, [1])
        assert run.checkpoints.current.state["sampler"]["reserve"] == []
        status = read_status(tmp_path)
        assert (status.restarts, status.step, status.resumed_from) == (1, 1, 1)
        advance(run, 2)
        with pytest.raises(DamageError):
            found_damaged(run)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    log = (tmp_path / "log.txt").read_text()
    assert "step-3: shard is damaged" in log and "step-2: shard is damaged" in log
    assert log.count("resuming after step") == 3


def test_with_every_checkpoint_damaged_the_run_ends(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
    with pytest.raises(CheckpointError, match="no checkpoint of this run can be used"):
        found_damaged(Run.open(config_of(tmp_path)))


def test_a_checkpoint_is_named_once_however_often_the_command_is_queued_again(tmp_path):
    """Taken again at every requeue it would throw away what was trained since, and end the run
    where pruning has deleted it."""
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


def test_a_checkpoint_of_another_run_is_named_once_too_and_need_not_stay(tmp_path):
    """Checkpoints from before the choice are no reason to leave it, whatever their number."""
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
def test_a_named_checkpoint_that_is_not_there_is_one_message(tmp_path, name):
    (tmp_path / "a-file").touch()
    with pytest.raises(CheckpointError, match=rf"run\.resume = .*{name}: there is no such"):
        Run.open(config_of(tmp_path / "run", resume=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("start", "evaluated"), [(0, [0, 2, 4, 5]), (2, [4, 5]), (3, [4, 5]), (5, [])]
)
def test_evaluation_before_during_and_after_but_never_twice(tmp_path, start, evaluated):
    run = Run.open(config_of(tmp_path))
    run.step = start
    if start:
        run.log.record_evaluation(evaluation(start))
    steps = [start, *range(start + 1, 6)]
    assert [step for step in steps if run.evaluates(step)] == evaluated


def test_an_evaluation_that_a_stop_cut_off_is_done_after_the_resume(tmp_path):
    """One that goes on beside the next step ends after the checkpoint of its own."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
    with Run.open(config_of(tmp_path)) as run:
        assert run.step == 2 and run.evaluates(2)


def reported(folder: Path) -> list[tuple[object, object]]:
    return [(r["eval/accuracy"], r["eval/policy_version"]) for r in read_metrics(folder)]


def record_step(run: Run, step: int) -> None:
    with run.phase("rollout"):
        pass
    run.log.record({"step": step, "tokens/generated": 10})
    run.complete(step, {"cursor": step})


def test_an_evaluation_is_in_the_record_of_the_step_in_which_it_became_known(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation(0))
        for step in run.steps():
            if step in (3, 5):
                run.log.record_evaluation(evaluation(step - 1))
            if step == 5:
                run.log.record_evaluation(evaluation(5))
            record_step(run, step)
    nothing = (None, None)
    assert reported(tmp_path) == [nothing, nothing, (0.5, 2), nothing, (0.5, 5)]


def test_a_step_that_is_done_again_reports_the_evaluation_that_it_did_not_ask_again(tmp_path):
    """The redone record would otherwise lack what that of an undisturbed run has."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        run.log.record_evaluation(evaluation(2))
    with Run.open(config_of(tmp_path)) as run:
        assert not run.evaluates(2)
        advance(run, 4)
    assert reported(tmp_path) == [(None, None), (None, None), (0.5, 2), (None, None)]


def test_an_evaluation_that_took_several_steps_is_reported_by_a_step_that_is_done_again(tmp_path):
    """It may be of an earlier step than the checkpoint that the run goes on from."""
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation(0))
        advance(run, 4)
        run.log.record_evaluation(evaluation(2))
    for _ in range(2):
        with Run.open(config_of(tmp_path)) as run:
            advance(run, 5)
        assert reported(tmp_path) == [(None, None)] * 4 + [(0.5, 2)]


def test_the_checkpoint_of_weights_that_are_still_evaluated_is_kept(tmp_path):
    """A run that is stopped then has them nowhere else."""
    config = config_of(tmp_path)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=1, keep=2)})
    with Run.open(config) as run:
        for step in run.steps():
            record_step(run, step)
            run.complete(step, {EVALUATING: 2} if step in (3, 4) else {})
            write = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
            run.save(write, wait=True)
            others = {step - 1, 2} if step in (3, 4) else {step - 1} - {0}
            assert saved_steps(tmp_path) == [f"step-{one}" for one in sorted(others | {step})]


def test_groups_are_kept_until_a_checkpoint_behind_them_is_committed(tmp_path):
    """A start that finds its checkpoint damaged, or a save that fails, has steps to do again."""
    journal = tmp_path / JOURNAL_FOLDER
    journal.mkdir()
    for version in range(4):
        (journal / f"version-{version}.log").touch()
    with Run.open(config_of(tmp_path)) as run:
        save_with(run, 2, fails)
        run.checkpoints.settle()
        assert len(list(journal.iterdir())) == 4
        save_with(run, 3, written_by(lambda folder: (folder / "shard").write_bytes(b"shard")))
        run.checkpoints.settle()
        assert [path.name for path in journal.iterdir()] == ["version-3.log"]


def test_answers_are_kept_until_their_evaluation_is_recorded(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        files = [answers_path(tmp_path, step) for step in (2, 4)]
        for file in files:
            file.touch()
        run.log.record_evaluation(evaluation(2))
        assert [file.exists() for file in files] == [False, True]


def test_the_time_of_a_phase_within_another_is_counted_once(tmp_path):
    """What an evaluation is waited for would otherwise be rollout time as well."""
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("rollout"), run.phase("evaluate"):
            time.sleep(0.05)
        run.log.record({"step": 1, "tokens/generated": 10})
    [record] = read_metrics(tmp_path)
    assert record["time/evaluate_s"] >= 0.05 > record["time/rollout_s"] >= 0.0


def test_no_evaluation_where_none_is_wanted(tmp_path):
    config = config_of(tmp_path)
    evaluation = config.evaluation.model_copy(update={"every": 0})
    off = config.model_copy(update={"evaluation": evaluation})
    run = Run.open(off)
    assert not any(run.evaluates(step) for step in range(6))


def test_an_interrupted_run_saves_its_last_step_once(tmp_path):
    """Saving the step a run resumed from again would need to overwrite it."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        run.save(lambda folder: pytest.fail("step 2 is saved already"))
    with Run.open(config_of(tmp_path)) as run:
        run.save(lambda folder: pytest.fail("step 2 is what the run resumed from"))
        advance(run, 3)
        run.save(written_by(lambda folder: (folder / "shard").write_bytes(b"3")))
    assert saved_steps(tmp_path) == ["step-2", "step-3"]


def fails(folder: Path) -> Any:
    (folder / "shard").write_bytes(b"half a sha")
    raise CheckpointError("rank 1: no space left on device")


def save_with(run: Run, step: int, write: WriteTrainer) -> None:
    record_step(run, step)
    run.complete(step, {"cursor": step})
    if run.checkpoints.is_due(step):
        run.save(write)


def test_a_failed_save_is_named_tried_again_and_leaves_nothing(tmp_path):
    """A run of weeks must not end with a file server's bad minute, nor go on for days unsaved."""
    good = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
    with Run.open(config_of(tmp_path)) as run:
        for step in run.steps():
            save_with(run, step, fails if step == 2 else good)
            if step == 3:
                break
    log = (tmp_path / "log.txt").read_text()
    assert "checkpoint of step 2" in log and "rank 1: no space left" in log and "tried again" in log
    assert saved_steps(tmp_path) == ["step-3"]


def test_a_run_whose_saves_keep_failing_ends_with_what_it_had(tmp_path):
    good = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
    with (
        pytest.raises(CheckpointError, match="step 5 .*rank 1: no space"),
        Run.open(config_of(tmp_path, num_steps=9)) as run,
    ):
        for step in run.steps():
            save_with(run, step, good if step < 3 else fails)
    assert run.step == 5
    assert saved_steps(tmp_path) == ["step-2"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """And the state that is saved is the step's own, whatever has come since."""
    written = threading.Event()

    def slow(folder: Path) -> Any:
        files = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))(folder)
        return lambda: files() if written.wait(20) else {}

    with Run.open(config_of(tmp_path)) as run:
        for step in run.steps():
            save_with(run, step, slow)
            if step == 3:
                assert saved_steps(tmp_path)[0].startswith("tmp-step-2")
                written.set()
                break
    assert saved_steps(tmp_path) == ["step-2"]
    manifest = json.loads((tmp_path / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert manifest["policy_version"] == 2 and manifest["layout"]["num_ranks"] == 1
    assert len(manifest["config_sha256"]) == 64 and "torch" in manifest["versions"]


def test_where_updates_outlast_the_grace_every_step_is_saved_and_an_update_is_given_up(tmp_path):
    """Else a preempted run of long steps would lose all steps since its last checkpoint."""
    config = config_of(tmp_path, grace_s=0.2)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=100)})
    write = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
    with pytest.raises(RunInterrupted, match="s more, and"), Run.open(config) as run:
        for step in run.steps():
            with run.phase("train"):
                time.sleep(0.3 if step == 2 else 0.0)
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(20)
            record_step(run, step)
            if run.checkpoints.is_due(step):
                run.save(write)
    assert saved_steps(tmp_path) == ["step-2", "step-3"]


def test_minutes_make_a_step_due_as_well_as_its_number(tmp_path):
    checkpoint = CheckpointConfig(every=100, every_minutes=1e-9)
    config = config_of(tmp_path).model_copy(update={"checkpoint": checkpoint})
    with Run.open(config) as run:
        advance(run, 1)
    assert saved_steps(tmp_path) == ["step-1"]


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.folder = .*file/run cannot be made"):
        Run.open(config_of(tmp_path / "file" / "run"))


def test_a_second_driver_is_refused_before_it_changes_anything(tmp_path):
    """It would cut back the records of the first, and prune its checkpoints."""
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with pytest.raises(ConfigError, match="is driven by process"):
            Run.open(config_of(tmp_path))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(CheckpointError):
        Run.open(config_of(tmp_path, resume="never"))
    with Run.open(config_of(tmp_path)):
        pass


def test_groups_scored_by_another_rule_are_not_trained_on(tmp_path):
    waiting = {"drawing": 7, "reserve": ["a group"], "unfinished": ["an answer"], "waiting": "b"}
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 1)
        run.complete(2, {"sampler": waiting, "kl": 0.5})
        run.save(written_by(lambda folder: (folder / "shard").write_bytes(b"shard")))
    changed = config_of(tmp_path)
    changed = changed.model_copy(update={"reward": RewardConfig(rule="boxed")})
    with pytest.raises(ConfigError, match=r"(?s)reward\.rule: .*--accept-changes"):
        Run.open(changed)
    with Run.open(changed, accept_changes=True) as run:
        assert run.checkpoints.current.state == {
            "sampler": {"drawing": 7, "reserve": [], "unfinished": [], "waiting": None},
            "kl": 0.5,
        }
    assert "are dropped" in (tmp_path / "log.txt").read_text()


def test_how_a_run_ended_is_its_last_line(tmp_path):
    with pytest.raises(InfraError), Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        raise InfraError("engine 1 is gone")
    line = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "end: state=failed step=2/5 checkpoint=2 reason='InfraError: engine 1 is gone'" in line


def test_evaluations_and_checkpoints_are_timed_in_the_next_record(tmp_path):
    """Their seconds would be lost, or counted twice, or taken for the step's own."""
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("evaluate"):
            time.sleep(0.02)
        for step in run.steps():
            with run.phase("rollout"):
                pass
            run.log.record({"step": step, "tokens/generated": 10})
            run.complete(step, {})
            if step == 2:
                run.save(written_by(lambda folder: time.sleep(0.03)))
            if step == 4:
                break
    times = [(r["time/evaluate_s"], r["time/checkpoint_s"]) for r in read_metrics(tmp_path)]
    assert times[0][0] >= 0.02 and times[2][1] >= 0.03
    assert times[1] == times[3] == (0.0, 0.0) and times[0][1] == times[2][0] == 0.0
    assert all(r["time/step_s"] < 0.02 for r in read_metrics(tmp_path))


def test_a_step_that_generates_nothing_has_neither_speed_nor_sync(tmp_path):
    """Zero tokens a second would be taken for engines that hang."""
    with Run.open(config_of(tmp_path)) as run:
        for name in ("rollout", "train", "sync"):
            with run.phase(name):
                pass
        record = run.log.record({"step": 1})
    assert record["tokens_per_s"] is None and record["time/sync_s"] is None
    assert record["time/step_s"] >= record["time/rollout_s"] + record["time/train_s"] > 0


def test_what_a_step_saved_is_there_with_its_record_and_redone_after_a_resume(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        for step in run.steps():
            with run.phase("rollout"):
                pass
            run.log.save_rollouts(step, iter([saved_group(step=step)]))
            run.log.record({"step": step, "tokens/generated": 10})
            assert rollouts.saved_steps(tmp_path) == list(range(1, step + 1))
            run.complete(step, {})
            if run.checkpoints.is_due(step):
                run.save(written_by(lambda folder: (folder / "shard").write_bytes(b"shard")))
            if step == 3:
                break
    with Run.open(config_of(tmp_path)):
        assert rollouts.saved_steps(tmp_path) == [1, 2]


def test_a_step_whose_rollouts_cannot_be_saved_is_not_recorded(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        (tmp_path / "rollouts").write_text("in the way")
        with run.phase("rollout"):
            pass
        run.log.save_rollouts(1, [saved_group(step=1)])
        with pytest.raises(InfraError, match=r"rollouts/step-1"):
            run.log.record({"step": 1, "tokens/generated": 10})
    assert read_metrics(tmp_path) == []


def test_nothing_is_saved_where_nothing_is_wanted(tmp_path):
    config = config_of(tmp_path)
    off = config.model_copy(update={"observe": ObserveConfig(saved_groups=0)})
    with Run.open(off) as run:
        run.log.save_rollouts(1, [saved_group(step=1)])
    assert not (tmp_path / "rollouts").exists()
