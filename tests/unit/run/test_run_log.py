"""What is written down of a run: evaluations, times, saved rollouts and its end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megadapo.errors import (
    InfraError,
)
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.records import read_metrics
from megadapo.observe.rollouts import files as rollouts
from megadapo.rollout.journal.journal import evaluation_journal_path
from megadapo.run.run import Run
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.checkpoints import written_by
from tests.support.runs.runs_alone import advance, config_of, evaluation, record_step


def reported(folder: Path) -> list[tuple[object, object]]:
    return [(r["eval/accuracy"], r["eval/policy_version"]) for r in read_metrics(folder)]


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


def test_answers_are_kept_until_their_evaluation_is_recorded(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        files = [evaluation_journal_path(tmp_path, step) for step in (2, 4)]
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
