"""Where a run stands: fresh, resumed, refused; and what it evaluates."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megadapo.errors import (
    CheckpointError,
    ConfigError,
    InfraError,
)
from megadapo.observe.metrics.records import read_evaluations, read_metrics
from megadapo.rewards.config import RewardConfig
from megadapo.run.run import Run
from megadapo.run.state.status import read_status
from tests.support.runs.checkpoints import written_by
from tests.support.runs.runs_alone import advance, config_of, evaluation, saved_steps


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


def test_no_evaluation_where_none_is_wanted(tmp_path):
    config = config_of(tmp_path)
    evaluation = config.evaluation.model_copy(update={"every": 0})
    off = config.model_copy(update={"evaluation": evaluation})
    run = Run.open(off)
    assert not any(run.evaluates(step) for step in range(6))


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


def test_a_start_that_fails_leaves_no_run_that_seems_to_go_on(tmp_path):
    """Catches a status that says "running" for good, and a lease that locks the folder."""

    def states(error: type[Exception]) -> tuple[str, list[Path]]:
        with pytest.raises(error), Run.open(config_of(tmp_path)):
            pass
        return read_status(tmp_path).state, list(tmp_path.glob("lease*"))

    (tmp_path / "config.json").mkdir()
    assert states(InfraError) == ("failed", [])
    (tmp_path / "config.json").rmdir()
    with ThreadPoolExecutor() as threads:
        # which may not take signals over
        assert threads.submit(states, ValueError).result() == ("failed", [])
    with Run.open(config_of(tmp_path)):
        assert read_status(tmp_path).state == "running"


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
