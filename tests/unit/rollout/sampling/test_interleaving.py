"""An evaluation beside training: neither may change the other's numbers."""

from collections.abc import Sequence

import pytest

from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.rollout.sampling.evaluation import (
    Evaluation,
    EvaluationInProgress,
    HeldOutRequests,
    InterleavedEngines,
)
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.types import OpenGroup
from tests.support.rollout.samplers import HALF, MAX_TOKENS, contents, make_sampler
from tests.support.rollout.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)

NUM_STEPS = 4
VERIFIER = RightAtLeast(HALF)
HELD_OUT = HeldOutRequests.create(
    {"": make_prompts(30)},
    EvaluationConfig(samples_per_problem=4),
    tokenizer=PlainTokenizer(),
    max_response_tokens=MAX_TOKENS,
    seed=0,
)


class Watched(ScriptedEngines):
    """Engines that remember every request, and their free capacity after it."""

    def __init__(self, finish: str = "at random", *, slots: int = 24, at_once: int = 1) -> None:
        super().__init__(finish, slots=slots, at_once=at_once)
        self.requests: list[OpenGroup] = []
        self.capacity_left: list[int] = []

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        capacity = self.capacity - sum(len(group.seeds) for group in groups)
        super().submit(groups)
        self.requests += groups
        self.capacity_left += [capacity] * len(groups)


def steps(
    engines: ScriptedEngines, *, evaluates: bool, **sampling: object
) -> tuple[list[SampledBatch], list[Evaluation]]:
    """Return a run's batches, and the evaluation beside each step."""
    shared = InterleavedEngines(engines)
    sampler: Sampler | BackgroundSampler = make_sampler(shared, **sampling)
    if sampling.get("mode") == "one_step_off":
        engines.policy_version = 0
        sampler = BackgroundSampler(sampler, NUM_STEPS)
        sampler.resume_sampling(0)
    batches, evaluations = [], []
    for _ in range(NUM_STEPS):
        with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
            shared.evaluation = running if evaluates else None
            batches.append(sampler.next_batch())
            sampler.pause_for_weights()
            evaluations.append(running.finish() if evaluates else None)
        assert engines.num_in_flight == 0 or sampling.get("mode") == "partial"
        engines.policy_version += 1
        sampler.resume_sampling(engines.policy_version)
    sampler.close()
    return batches, evaluations


def alone() -> Evaluation:
    with EvaluationInProgress(ScriptedEngines(), VERIFIER, HELD_OUT) as running:
        return running.finish()


@pytest.mark.parametrize("finish", ["short first", "last first", "at random"])
@pytest.mark.parametrize("slots", [3, 24, 400])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"mode": "rounds"}, {"mode": "one_step_off", "max_staleness": 1}],
    ids=["sync", "rounds", "one_step_off"],
)
def test_training_and_evaluation_do_not_change_each_other(finish, slots, sampling):
    engines = Watched(finish, slots=slots, at_once=3)
    batches, evaluations = steps(engines, evaluates=True, **sampling)
    undisturbed, _ = steps(ScriptedEngines(), evaluates=False, **sampling)
    assert contents(batches) == contents(undisturbed)
    assert evaluations == [alone()] * NUM_STEPS


def test_partial_step_does_not_stop_the_evaluation():
    batches, evaluations = steps(Watched(), evaluates=True, mode="partial", max_staleness=2)
    assert evaluations == [alone()] * NUM_STEPS
    assert [batch.num_kept for batch in batches] == [8] * NUM_STEPS
    assert all(group.prompt_index >= 0 for batch in batches for group in batch.groups)


def test_evaluation_uses_idle_slots():
    """Until the batch is full, no evaluation request may delay training."""
    engines = Watched("short first")
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
        shared.evaluation = running
        make_sampler(shared).next_batch()
    training = [request for request in engines.requests if request.key >= 0]
    asked = [
        (request, left)
        for request, left in zip(engines.requests, engines.capacity_left, strict=True)
        if request.key < 0
    ]
    beside = [request for request, left in asked if left >= 0]
    assert 0 < len(beside) < len(asked) == len(HELD_OUT.requests)
    assert min(r.priority for r, _ in asked) > max(r.priority for r in training)
    # remaining requests are submitted when the batch is full
    assert [request for request, _ in asked[: len(beside)]] == beside


def test_evaluation_does_not_reduce_capacity():
    engines = Watched(slots=24)
    shared = InterleavedEngines(engines)
    with EvaluationInProgress(engines, VERIFIER, HELD_OUT) as running:
        shared.evaluation = running
        running.submit(10)
        assert (engines.capacity, shared.capacity) == (16, 24)
        assert (engines.num_in_flight, shared.num_in_flight) == (2, 0)
