import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from megadapo.data.prompts import PromptStream
from megadapo.errors import CheckpointError, DataError, SamplingError
from megadapo.observe.saved_group import Fate
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.requests import SamplingSettings
from megadapo.rollout.sampler import SampledBatch, Sampler
from tests.support.scripted_engines import (
    POLICY_VERSION,
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)

MAX_TOKENS = 12
HALF = 28
"""About every second response has digits that sum to this or more."""
RARE = 58
"""About one group in seven has a response that does."""


def make_sampler(
    engines, *, bound=HALF, num_prompts=50, seed=0, saved_groups=None, **config
) -> Sampler:
    named = {} if saved_groups is None else {"saved_groups": saved_groups}
    config = {"prompts_per_step": 8, "responses_per_prompt": 3, **config}
    return Sampler(
        engines,
        PromptStream(make_prompts(num_prompts), seed),
        RightAtLeast(bound),
        SamplingConfig(**config),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
        tokenizer=PlainTokenizer(),
        seed=seed,
        **named,
    )


def take(sampler: Sampler, num_steps: int) -> list[SampledBatch]:
    return [sampler.next_batch() for _ in range(num_steps)]


def contents(batches: list[SampledBatch]) -> list[str]:
    """All that a step trains on and reports, times apart; repr, so that NaN equals NaN."""
    timed = {"reward_seconds", "engines"}
    return [repr([v for k, v in vars(b).items() if k not in timed]) for b in batches]


def test_the_batch_is_full_of_groups_that_teach():
    for batch in take(make_sampler(ScriptedEngines()), 5):
        assert batch.num_kept == 8
        for group in batch.groups:
            assert 0 < sum(group.correct) < 3
            assert group.rewards == tuple(1.0 if ok else -1.0 for ok in group.correct)


@pytest.mark.parametrize("reverse", [False, True])
def test_who_finishes_first_does_not_matter(reverse):
    """Filling the batch with early finishers would prefer short answers."""
    expected = take(make_sampler(ScriptedEngines()), 4)
    other = take(make_sampler(ScriptedEngines("short first", reverse=reverse)), 4)
    assert contents(expected) == contents(other)


def test_groups_are_taken_in_asking_order_and_none_twice():
    orders = [
        group.order for batch in take(make_sampler(ScriptedEngines()), 12) for group in batch.groups
    ]
    assert orders == sorted(set(orders))


def test_surplus_is_used_first_in_the_next_step():
    sampler = make_sampler(ScriptedEngines(), oversampling=3.0, reserve_limit=7)
    first, second = take(sampler, 2)
    assert first.num_to_reserve == second.num_from_reserve > 0
    asked_before = first.num_sampled
    from_reserve = second.groups[: second.num_from_reserve]
    assert all(group.order < asked_before for group in from_reserve)
    assert all(group.order >= asked_before for group in second.groups[second.num_from_reserve :])


def test_the_counts_add_up_with_a_reserve_that_overflows():
    sampler = make_sampler(ScriptedEngines(), oversampling=4.0, reserve_limit=2)
    dropped = 0
    for batch in take(sampler, 6):
        fresh = batch.num_kept - batch.num_from_reserve
        surplus = batch.num_to_reserve + batch.num_dropped
        wasted = batch.num_all_correct + batch.num_all_wrong
        assert batch.num_sampled == fresh + surplus + wasted
        dropped += batch.num_dropped
    assert dropped > 0


def test_the_metrics_are_about_all_responses_of_the_step():
    """Over the kept groups alone, accuracy would be near a half whatever the policy can do."""
    engines = ScriptedEngines()
    sampler = make_sampler(engines, bound=RARE, num_prompts=500, max_asked_per_prompt=40.0)
    batch = sampler.next_batch()
    assert batch.num_sampled == sum(len(keys) for keys in engines.rounds)
    assert batch.num_all_wrong > 4 * batch.num_kept
    responses = all_responses(batch, sampler, engines)
    lengths = [len(text) for text in responses]
    right = [sum(map(int, text)) >= RARE for text in responses]
    assert batch.accuracy == np.mean(right) < 0.1
    assert batch.reward_mean == pytest.approx(2 * np.mean(right) - 1)
    assert batch.response_length_mean == np.mean(lengths)
    assert batch.response_length_p95 == np.quantile(lengths, 0.95)
    assert batch.truncated_fraction == np.mean([n == MAX_TOKENS for n in lengths]) > 0
    assert batch.num_tokens == sum(lengths)


def all_responses(batch, sampler, engines) -> list[str]:
    """Ask once more for what the sampler asked for, from the names of its groups."""
    from megadapo.rollout.requests import response_seeds
    from tests.support.scripted_engines import respond

    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
    prompts = PromptStream(make_prompts(500), 0).next(batch.num_sampled)
    keys = [key for keys in engines.rounds for key in keys]
    assert keys == list(range(batch.num_sampled))
    return [
        respond(seed, settings).text
        for key, prompt in zip(keys, prompts, strict=True)
        for seed in response_seeds(3, 0, "train", key, prompt.id)
    ]


def test_samples_carry_what_the_engine_said():
    group = make_sampler(ScriptedEngines()).next_batch().groups[0]
    for sample in group.samples:
        assert sample.policy_versions.tolist() == [POLICY_VERSION] * len(sample.response_ids)
        assert len(sample.logprobs_rollout) == len(sample.response_ids)
        assert np.isnan(sample.logprobs_rollout[0])
        assert sample.text == "".join(str(i - 3) for i in sample.response_ids)
        assert "".join(map(chr, sample.prompt_ids)) == group.prompt.messages[0][1]


def test_every_group_of_a_step_can_be_saved_with_what_became_of_it():
    """A group that was thrown away could otherwise never be looked at."""
    config = {"oversampling": 4.0, "reserve_limit": 2, "bound": 35}
    batches = take(make_sampler(ScriptedEngines(), saved_groups="all", **config), 6)
    for batch in batches:
        orders = [sampled.group.order for sampled in batch.saved]
        assert orders == sorted(set(orders))
        assert len(orders) == batch.num_sampled + batch.num_from_reserve
        fates = Counter(sampled.fate for sampled in batch.saved)
        assert fates["trained"] == batch.num_kept
        assert fates["to_reserve"] == batch.num_to_reserve
        assert fates["dropped"] == batch.num_dropped
        assert fates["all_correct"] == batch.num_all_correct
        assert fates["all_wrong"] == batch.num_all_wrong
        trained = [sampled.group for sampled in batch.saved if sampled.fate == "trained"]
        assert all(one is two for one, two in zip(trained, batch.groups, strict=True))
        assert sum(sampled.from_reserve for sampled in batch.saved) == batch.num_from_reserve
    seen = Counter(sampled.fate for batch in batches for sampled in batch.saved)
    assert min(seen[fate] for fate in get_args(Fate)) > 0, "not all fates were tried"


def test_nothing_is_saved_unless_a_number_is_named():
    """Another default would hold texts that nobody asked for."""
    (batch,) = take(make_sampler(ScriptedEngines()), 1)
    assert batch.num_kept == 8 and batch.saved == ()


def test_what_is_saved_changes_nothing_else():
    few, every = (
        take(make_sampler(ScriptedEngines(), saved_groups=limit, oversampling=2.0), 4)
        for limit in (2, "all")
    )
    assert [len(batch.saved) for batch in few] == [2] * 4
    assert contents([replace(batch, saved=()) for batch in few]) == contents(
        [replace(batch, saved=()) for batch in every]
    )


def test_a_group_keeps_what_the_verifier_read():
    group = make_sampler(ScriptedEngines()).next_batch().groups[0]
    assert group.answers == tuple(sample.text[-1:] for sample in group.samples)
    assert group.symbolic_correct == (None, None, None)


def test_each_engines_share_is_counted():
    batch = make_sampler(ScriptedEngines(num_engines=3), bound=RARE, num_prompts=500).next_batch()
    assert len(batch.engines) == 3
    assert sum(share.num_tokens for share in batch.engines) == batch.num_tokens
    assert all(share.seconds > 0 for share in batch.engines)
    assert sum(batch.response_lengths) == batch.num_tokens


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(stop_after):
    """Also twice in a row, with a reserve that is not empty and across an epoch's end."""
    config = {"num_prompts": 31, "oversampling": 2.0}
    sampler = make_sampler(ScriptedEngines(), **config)
    expected = take(sampler, 7)
    batches: list[SampledBatch] = []
    state = make_sampler(ScriptedEngines(), **config).state_dict()
    while len(batches) < 7:
        resumed = make_sampler(ScriptedEngines("short first"), **config)
        resumed.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        batches += take(resumed, min(stop_after, 7 - len(batches)))
        state = resumed.state_dict()
    assert contents(batches) == contents(expected)
    assert state == sampler.state_dict()
    assert any(batch.num_from_reserve for batch in expected)


def test_another_seed_draws_other_responses():
    assert contents(take(make_sampler(ScriptedEngines(), seed=0), 1)) != contents(
        take(make_sampler(ScriptedEngines(), seed=1), 1)
    )


@pytest.mark.parametrize("key", ["next_order", "yield", "reserve", "prompts"])
def test_a_damaged_state_is_refused(key):
    state = make_sampler(ScriptedEngines()).state_dict()
    del state[key]
    with pytest.raises((CheckpointError, DataError)):
        make_sampler(ScriptedEngines()).load_state_dict(state)


@pytest.mark.parametrize(("bound", "histogram"), [(10_000, "  0 of 3"), (-1, "  3 of 3")])
def test_nothing_that_teaches_ends_in_a_message_and_not_in_an_endless_loop(bound, histogram):
    engines = ScriptedEngines()
    with pytest.raises(SamplingError, match="0 of 8 groups") as raised:
        make_sampler(engines, bound=bound, max_asked_per_prompt=5.0).next_batch()
    assert f"{histogram} right: 40 groups" in str(raised.value)
    assert sum(len(keys) for keys in engines.rounds) == 40


def test_at_the_bound_the_step_trains_on_what_was_found():
    batch = make_sampler(ScriptedEngines(), bound=RARE, max_asked_per_prompt=2.0).next_batch()
    assert 0 < batch.num_kept < 8
    assert batch.num_sampled == 16


def test_a_shortfall_can_stop_the_run_instead():
    sampler = make_sampler(
        ScriptedEngines(), bound=RARE, max_asked_per_prompt=2.0, on_shortfall="stop"
    )
    with pytest.raises(SamplingError, match="of 8 groups"):
        sampler.next_batch()


class WaitsForTheJudge(ScriptedEngines):
    """Finishes its last group only after the first one has been scored."""

    def __init__(self, scored: threading.Event) -> None:
        super().__init__()
        self._scored = scored

    def generate(self, groups, settings) -> Iterator:
        answers = list(super().generate(groups, settings))
        yield from answers[:-1]
        assert self._scored.wait(timeout=10), "nothing was scored while the last group ran"
        yield answers[-1]


def test_scoring_runs_while_generation_goes_on():
    scored = threading.Event()

    class Judge(RightAtLeast):
        def score_batch(self, responses, ground_truths):
            scored.set()
            return super().score_batch(responses, ground_truths)

    sampler = make_sampler(WaitsForTheJudge(scored))
    sampler._verifier = Judge(HALF)
    assert sampler.next_batch().num_kept == 8


def test_the_time_of_scoring_is_that_of_all_rounds():
    """The last round's alone would hide a slow verifier: most groups come in the first ones."""

    class Slow(RightAtLeast):
        seconds = 0.0

        def score_batch(self, responses, ground_truths):
            start = time.perf_counter()
            time.sleep(0.001)
            scores = super().score_batch(responses, ground_truths)
            self.seconds += time.perf_counter() - start
            return scores

    engines, judge = ScriptedEngines(), Slow(RARE)
    sampler = make_sampler(engines, bound=RARE, num_prompts=500, max_asked_per_prompt=40.0)
    sampler._verifier = judge
    batch = sampler.next_batch()
    assert len(engines.rounds) > 1
    assert judge.seconds <= batch.reward_seconds < 2 * judge.seconds


def test_a_failing_verifier_ends_the_step():
    """An exception in the scoring thread must not be lost."""

    class Broken:
        def score_batch(self, responses, ground_truths):
            raise ValueError("no score")

    sampler = make_sampler(ScriptedEngines())
    sampler._verifier = Broken()
    with pytest.raises(ValueError, match="no score"):
        sampler.next_batch()
