"""An evaluation beside training: neither changes a number of the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megadapo.data.prompts import PromptStream
from megadapo.rollout.config import EvaluationConfig, SamplingConfig
from megadapo.rollout.sampling.ahead import AheadSampler
from megadapo.rollout.sampling.evaluation import (
    Evaluation,
    EvaluationInProgress,
    HeldOut,
    InterleavedEngines,
)
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import GroupRequest, SamplingSettings
from tests.support.rollout.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)

NUM_STEPS = 4
VERIFIER = RightAtLeast(28)
TIMED = {"reward_seconds", "engines", "group_seconds", "num_stopped", "num_surplus"} | {
    "num_tokens_stopped"
}
HELD_OUT = HeldOut.create(
    make_prompts(30),
    EvaluationConfig(samples_per_problem=4),
    tokenizer=PlainTokenizer(),
    max_response_tokens=12,
    seed=0,
)


class Watched(ScriptedEngines):
    """Remembers every request and how full the engines were with it."""

    def __init__(self, finish: str = "at random", *, slots: int = 24, at_once: int = 1) -> None:
        super().__init__(finish, slots=slots, at_once=at_once)
        self.requests: list[GroupRequest] = []
        self.room_left: list[int] = []

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        capacity = self.capacity - sum(len(group.seeds) for group in groups)
        super().submit(groups)
        self.requests += groups
        self.room_left += [capacity] * len(groups)


def make_sampler(engines: ScriptedEngines | InterleavedEngines, **sampling: object) -> Sampler:
    return Sampler(
        engines,
        PromptStream(make_prompts(50), 0),
        VERIFIER,
        SamplingConfig(**{"prompts_per_step": 8, "responses_per_prompt": 3, **sampling}),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=12),
        tokenizer=PlainTokenizer(),
        seed=0,
    )


def steps(
    engines: ScriptedEngines, *, evaluates: bool, **sampling: object
) -> tuple[list[SampledBatch], list[Evaluation]]:
    """A run's batches, and an evaluation beside each of its steps."""
    shared = InterleavedEngines(engines)
    sampler: Sampler | AheadSampler = make_sampler(shared, **sampling)
    if sampling.get("mode") == "one_step_off":
        engines.policy_version = 0
        sampler = AheadSampler(sampler, shared, NUM_STEPS)
    batches, evaluations = [], []
    for _ in range(NUM_STEPS):
        with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as under_way:
            shared.evaluation = under_way if evaluates else None
            batches.append(sampler.next_batch())
            sampler.wait()
            evaluations.append(under_way.finish() if evaluates else None)
        assert engines.num_in_flight == 0 or sampling.get("mode") == "partial"
        engines.policy_version += 1
    return batches, evaluations


def contents(batches: Sequence[SampledBatch]) -> list[str]:
    """All that follows from seed and weights alone."""
    return [repr([v for k, v in vars(b).items() if k not in TIMED]) for b in batches]


def alone() -> Evaluation:
    with EvaluationInProgress(ScriptedEngines(), VERIFIER, HELD_OUT) as under_way:
        return under_way.finish()


@pytest.mark.parametrize("finish", ["short first", "last first", "at random"])
@pytest.mark.parametrize("slots", [3, 24, 400])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"mode": "rounds"}, {"mode": "one_step_off", "max_staleness": 1}],
    ids=["sync", "rounds", "one_step_off"],
)
def test_training_and_evaluation_have_the_numbers_that_each_has_alone(finish, slots, sampling):
    engines = Watched(finish, slots=slots, at_once=3)
    batches, evaluations = steps(engines, evaluates=True, **sampling)
    undisturbed, _ = steps(ScriptedEngines(), evaluates=False, **sampling)
    assert contents(batches) == contents(undisturbed)
    assert evaluations == [alone()] * NUM_STEPS


def test_answers_that_go_on_in_the_next_step_leave_the_evaluation_alone():
    """A partial step stops its own groups alone, and takes none of the others over."""
    batches, evaluations = steps(Watched(), evaluates=True, mode="partial", max_staleness=2)
    assert evaluations == [alone()] * NUM_STEPS
    assert [batch.num_kept for batch in batches] == [8] * NUM_STEPS
    assert all(group.prompt_index >= 0 for batch in batches for group in batch.groups)


def test_the_evaluation_fills_slots_that_training_leaves_and_waits_behind_it():
    """Before the batch is full, a question that overfills the engines would delay training."""
    engines = Watched("short first")
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as under_way:
        shared.evaluation = under_way
        make_sampler(shared).next_batch()
    training = [request for request in engines.requests if request.key >= 0]
    asked = [
        (request, left)
        for request, left in zip(engines.requests, engines.room_left, strict=True)
        if request.key < 0
    ]
    beside = [request for request, left in asked if left >= 0]
    assert 0 < len(beside) < len(asked) == len(HELD_OUT.requests)
    assert min(r.priority for r, _ in asked) > max(r.priority for r in training)
    # what did not fit beside training is asked as soon as the batch is full
    assert [request for request, _ in asked[: len(beside)]] == beside


def test_training_sees_the_room_that_it_would_have_alone():
    engines = Watched(slots=24)
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as under_way:
        shared.evaluation = under_way
        under_way.submit(10)
        assert (engines.capacity, shared.capacity) == (16, 24)
        assert (engines.num_in_flight, shared.num_in_flight) == (2, 0)
