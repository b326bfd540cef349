"""Records of a run: evaluations, times, saved rollouts and its end."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megadapo.errors import InfraError
from megadapo.observe.metrics.records import read_evaluations, read_metrics
from megadapo.observe.rollouts import files as rollouts
from megadapo.observe.summary import before_after
from megadapo.rollout.journal.journal import evaluation_journal_path
from megadapo.run.run import Run
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.checkpoints import write_shard, written_by
from tests.support.runs.recorded_runs import evaluation_record
from tests.support.runs.runs_alone import advance, config_of, record_step


def reported(folder: Path) -> list[tuple[object, object]]:
    return [(r["eval/accuracy"], r["eval/policy_version"]) for r in read_metrics(folder)]


def test_evaluation_is_in_the_next_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        for step in run.steps():
            if step in (3, 5):
                run.log.record_evaluation(evaluation_record(step - 1))
            if step == 5:
                run.log.record_evaluation(evaluation_record(5))
            record_step(run, step)
    nothing = (None, None)
    assert reported(tmp_path) == [nothing, nothing, (0.5, 2), nothing, (0.5, 5)]


def test_redone_step_reuses_evaluation(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        run.log.record_evaluation(evaluation_record(2))
    with Run.open(config_of(tmp_path)) as run:
        assert not run.evaluates(2)
        advance(run, 4)
    assert reported(tmp_path) == [(None, None), (None, None), (0.5, 2), (None, None)]


def test_redone_step_reports_older_evaluation(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        advance(run, 4)
        run.log.record_evaluation(evaluation_record(2))
    for _ in range(2):
        with Run.open(config_of(tmp_path)) as run:
            advance(run, 5)
        assert reported(tmp_path) == [(None, None)] * 4 + [(0.5, 2)]


def test_recorded_evaluation_deletes_its_answers(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        files = [evaluation_journal_path(tmp_path, step) for step in (2, 4)]
        for file in files:
            file.touch()
        run.log.record_evaluation(evaluation_record(2))
        assert [file.exists() for file in files] == [False, True]


def test_nested_phase_is_timed_once(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("rollout"), run.phase("evaluate"):
            time.sleep(0.05)
        run.log.record({"step": 1, "tokens/generated": 10})
    [record] = read_metrics(tmp_path)
    assert record["time/evaluate_s"] >= 0.05 > record["time/rollout_s"] >= 0.0


def test_last_log_line_says_how_the_run_ended(tmp_path):
    with pytest.raises(InfraError), Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        raise InfraError("engine 1 is gone")
    line = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "end: state=failed step=2/5 checkpoint=2 reason='InfraError: engine 1 is gone'" in line


def test_evaluations_and_saves_are_timed_in_next_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("evaluate"):
            time.sleep(0.02)
        for step in run.steps():
            record_step(run, step)
            if step == 2:
                run.save(written_by(lambda folder: time.sleep(0.03)))
            if step == 4:
                break
    times = [(r["time/evaluate_s"], r["time/checkpoint_s"]) for r in read_metrics(tmp_path)]
    assert times[0][0] >= 0.02 and times[2][1] >= 0.03
    assert times[1] == times[3] == (0.0, 0.0) and times[0][1] == times[2][0] == 0.0
    assert all(r["time/step_s"] < 0.02 for r in read_metrics(tmp_path))


def test_step_without_generation_has_no_speed_or_sync(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        for name in ("rollout", "train", "sync"):
            with run.phase(name):
                pass
        record = run.log.record({"step": 1})
    assert record["tokens_per_s"] is None and record["time/sync_s"] is None
    assert record["time/step_s"] >= record["time/rollout_s"] + record["time/train_s"] > 0


def test_saved_rollouts_precede_record_and_are_rewound(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        for step in run.steps():
            run.log.save_rollouts(step, iter([saved_group(step=step)]))
            record_step(run, step)
            assert rollouts.saved_steps(tmp_path) == list(range(1, step + 1))
            if run.checkpoints.is_due(step):
                run.save(write_shard)
            if step == 3:
                break
    with Run.open(config_of(tmp_path)):
        assert rollouts.saved_steps(tmp_path) == [1, 2]


def test_unsaved_rollouts_prevent_the_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        (tmp_path / "rollouts").write_text("in the way")
        run.log.save_rollouts(1, [saved_group(step=1)])
        with pytest.raises(InfraError, match=r"rollouts/step-1"):
            record_step(run, 1)
    assert read_metrics(tmp_path) == []


def test_saved_rollouts_can_be_off(tmp_path):
    with Run.open(config_of(tmp_path, {"observe.saved_groups": 0})) as run:
        run.log.save_rollouts(1, [saved_group(step=1)])
    assert not (tmp_path / "rollouts").exists()


def test_named_sets_are_in_the_records_and_the_summary(tmp_path):
    """A record of the mean alone would hide a set that gets worse."""
    sets = {
        "aime24": {"accuracy": 0.25, "standard_error": 0.1, "num_problems": 30},
        "aime25": {"accuracy": 0.75, "standard_error": math.nan, "num_problems": 1},
    }
    evaluation = replace(evaluation_record(1), sets=sets)
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 1)
        run.log.record_evaluation(evaluation)
        advance(run, 2)
    record = read_metrics(tmp_path)[-1]
    assert [record[f"held_out/{name}/accuracy"] for name in sets] == [0.25, 0.75]
    [read] = read_evaluations(tmp_path)
    assert math.isnan(read.sets["aime25"].pop("standard_error"))
    assert read.sets["aime24"] == sets["aime24"]
    rows = {name: (first, last) for name, first, last in before_after([record], [evaluation])}
    assert rows["of aime24 (30 problems)"] == ("0.250 ± 0.100", "0.250 ± 0.100")
    with Run.open(config_of(tmp_path / "one")) as run:
        run.log.record_evaluation(evaluation_record(1))
    assert '"sets"' not in (tmp_path / "one" / "evaluations.jsonl").read_text()
