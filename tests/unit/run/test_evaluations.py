"""When the evaluations of a run are asked, waited for and handed over, and under which step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megadapo.config import RunConfig, from_dict
from megadapo.rollout.answer_log import answers_path
from megadapo.run.evaluations import Evaluations
from megadapo.run.sampling import Questions
from tests.support.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)

NUM_PROBLEMS = 6


class Phases:
    """Remembers which phases there were."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def config_of(placement: str) -> RunConfig:
    return from_dict(
        {
            "run": {"folder": "somewhere", "num_steps": 5},
            "model": {"path": "somewhere"},
            "data": {"train": "arithmetic:train:64", "held_out": "arithmetic:held_out:8"},
            "evaluation": {"every": 1, "samples_per_problem": 4, "placement": placement},
            "rollout": {"max_response_tokens": 20},
            "algorithm": {"overlong_buffer": 0},
            "trainer": {"optimizer": {"warmup_steps": 2}},
        }
    )


def make(
    placement: str, engines: ScriptedEngines, folder: Path | None = None, weights: str = "weights"
) -> Evaluations:
    questions = Questions(
        tokenizer=PlainTokenizer(),
        prompts=[],
        held_out=make_prompts(NUM_PROBLEMS),
        verifier=RightAtLeast(40),
    )
    return Evaluations(
        config_of(placement),
        engines,
        questions,
        Phases(),
        fingerprint=lambda: weights,
        folder=folder,
    )


@pytest.mark.parametrize(("placement", "step"), [("alone", 2), ("interleaved", 5)])
def test_an_evaluation_that_nothing_follows_is_finished_at_once(placement, step):
    """After the last step there are no rollouts that it could go beside."""
    evaluations = make(placement, ScriptedEngines())
    evaluations.begin(step)
    assert evaluations.sampling_engines.evaluation is None
    [record] = evaluations.take_finished()
    assert (record.step, record.num_problems) == (step, NUM_PROBLEMS)
    assert evaluations.take_finished() == []


def test_one_beside_rollouts_is_of_the_weights_that_were_there_when_it_began():
    engines = ScriptedEngines()
    engines.policy_version = 2
    alone = make("alone", engines)
    alone.begin(2)
    evaluations = make("interleaved", engines)
    evaluations.begin(2)
    assert evaluations.take_finished() == []
    assert evaluations.sampling_engines.evaluation is not None
    evaluations.finish()
    assert evaluations.take_finished() == alone.take_finished()
    assert evaluations.sampling_engines.evaluation is None and engines.num_in_flight == 0
    evaluations.finish()
    assert evaluations.take_finished() == []


def test_only_answers_of_the_same_weights_are_taken_over(tmp_path):
    """A step that is done again may end in other weights: where kernels add in any order."""
    first = ScriptedEngines()
    make("alone", first, tmp_path).begin(3)
    assert len(answers_path(tmp_path, 3).read_text().splitlines()) == NUM_PROBLEMS
    for weights, num_asked in (("weights", 0), ("other weights", NUM_PROBLEMS)):
        engines = ScriptedEngines()
        evaluations = make("alone", engines, tmp_path, weights)
        evaluations.begin(3)
        assert len(engines.asked) == num_asked
        assert len(evaluations.take_finished()) == 1


def test_where_no_answers_are_kept_the_weights_are_not_looked_at():
    evaluations = make("alone", ScriptedEngines())
    evaluations._fingerprint = lambda: pytest.fail("nobody asked for it")
    evaluations.begin(1)
    assert len(evaluations.take_finished()) == 1


def test_what_is_under_way_can_be_given_up():
    evaluations = make("interleaved", ScriptedEngines())
    evaluations.begin(1)
    evaluations.close()
    assert evaluations.take_finished() == []
