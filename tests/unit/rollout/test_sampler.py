import json
import threading
import time
from collections import Counter
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
    AtOnce,
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
    engines,
    *,
    bound=HALF,
    num_prompts=50,
    seed=0,
    saved_groups=None,
    judge=None,
    sampler=None,
    **config,
) -> Sampler:
    named = dict(sampler or {}) | ({} if saved_groups is None else {"saved_groups": saved_groups})
    if config.get("max_staleness"):
        # which groups come back in time depends on the speed of scoring as well
        named["scoring"] = AtOnce
    config = {"prompts_per_step": 8, "responses_per_prompt": 3, **config}
    return Sampler(
        engines,
        PromptStream(make_prompts(num_prompts), seed),
        judge or RightAtLeast(bound),
        SamplingConfig(**config),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
        tokenizer=PlainTokenizer(),
        seed=seed,
        **named,
    )


def take(sampler: Sampler, num_steps: int) -> list[SampledBatch]:
    """The batches of as many steps, each of which publishes weights."""
    batches = []
    for _ in range(num_steps):
        batches.append(sampler.next_batch())
        sampler._engines.policy_version += 1
    return batches


TIMED = {"reward_seconds", "engines", "group_seconds", "num_stopped", "num_surplus"} | {
    "num_tokens_stopped"
}


def contents(batches: list[SampledBatch]) -> list[str]:
    """All that a step trains on and reports, but what follows from the engines' speed; repr, so
    that NaN equals NaN."""
    return [repr([v for k, v in vars(b).items() if k not in TIMED]) for b in batches]


def test_the_batch_is_full_of_groups_that_teach():
    for batch in take(make_sampler(ScriptedEngines()), 5):
        assert batch.num_kept == 8
        for group in batch.groups:
            assert 0 < sum(group.correct) < 3
            assert group.rewards == tuple(1.0 if ok else -1.0 for ok in group.correct)


@pytest.mark.parametrize("finish", ["short first", "last first", "at random"])
@pytest.mark.parametrize("slots", [3, 12, 200])
@pytest.mark.parametrize("at_once", [1, 5])
def test_neither_speed_nor_number_of_engines_matters(finish, slots, at_once):
    """Filling the batch with early finishers would prefer short answers."""
    expected = take(make_sampler(ScriptedEngines()), 6)
    other = take(make_sampler(ScriptedEngines(finish, slots=slots, at_once=at_once)), 6)
    assert contents(expected) == contents(other)


def test_the_batch_is_the_first_groups_with_a_signal():
    """A late group is waited for, never replaced by a shorter one."""
    (every,) = take(make_sampler(ScriptedEngines(), selection="all", prompts_per_step=40), 1)
    with_signal = [group.order for group in every.groups if 0 < sum(group.correct) < 3]
    batches = take(make_sampler(ScriptedEngines("short first")), 2)
    orders = [group.order for batch in batches for group in batch.groups]
    assert orders == with_signal[:16]


def test_what_has_a_signal_can_be_said_from_outside():
    """As where steps are compared: groups that are all right or all wrong are in the batch too,
    and nothing is kept of the others."""
    every_third = {"has_signal": lambda group: group.order % 3 == 0}
    (batch,) = take(make_sampler(ScriptedEngines(), bound=0, sampler=every_third), 1)
    assert [group.order for group in batch.groups] == [3 * place for place in range(8)]
    assert batch.num_all_correct == batch.num_sampled == 22


def test_groups_are_taken_in_asking_order_and_none_twice():
    orders = [
        group.order for batch in take(make_sampler(ScriptedEngines()), 12) for group in batch.groups
    ]
    assert orders == sorted(set(orders))


def test_the_next_step_begins_behind_the_last_group_of_the_batch():
    """What was asked for beyond it, with old weights, is neither used nor lost."""
    engines = ScriptedEngines(slots=200)
    batches = take(make_sampler(engines, saved_groups="all"), 4)
    assert sum(batch.num_surplus + batch.num_stopped for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        first = min(sampled.group.order for sampled in after.saved)
        assert first == max(group.order for group in before.groups) + 1
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        assert batch.num_from_reserve == batch.num_to_reserve == 0
        samples = [sample for group in batch.groups for sample in group.samples]
        assert {int(v) for s in samples for v in s.policy_versions} == {version}


def test_the_engines_are_never_asked_for_more_than_they_have_room_for():
    """A backlog inside an engine could neither be dealt out again nor be taken back cheaply."""
    engines = ScriptedEngines("at random", slots=12)
    largest = 0
    submit = engines.submit

    def watched(groups):
        nonlocal largest
        submit(groups)
        largest = max(largest, engines.num_in_flight)

    engines.submit = watched
    take(make_sampler(engines), 3)
    assert largest == 4


def test_stragglers_lose_their_slots_once_they_cannot_get_in():
    """The long groups behind the last one needed would otherwise run to their end."""
    engines = ScriptedEngines("last first", slots=200)
    (batch,) = take(make_sampler(engines), 1)
    assert batch.num_stopped + batch.num_surplus > 0
    assert batch.num_tokens_stopped > 0 and engines.num_in_flight == 0


class Reserving:
    """Settings under which surplus groups wait for the next step."""

    config = {"max_staleness": 1, "reserve_limit": 7}


def test_surplus_is_used_first_in_the_next_step():
    engines = ScriptedEngines("last first", slots=200)
    batches = take(make_sampler(engines, **Reserving.config), 6)
    assert sum(batch.num_to_reserve for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        assert after.num_from_reserve == before.num_to_reserve
        versions = [group.oldest_version for group in after.groups]
        assert versions == sorted(versions)
        assert sum(v < max(versions) for v in versions) == after.num_from_reserve


def test_no_group_is_older_than_it_may_be():
    """With two engines' worth of surplus a step, some would wait for longer."""
    engines = ScriptedEngines("at random", slots=200)
    sampler = make_sampler(engines, max_staleness=2, reserve_limit=7)
    for version, batch in enumerate(take(sampler, 8), start=POLICY_VERSION):
        assert min(group.oldest_version for group in batch.groups) >= version - 2


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_with_a_reserve_every_prompt_is_used_or_judged_once(max_staleness):
    """Skipping what was stopped would lose long answers; asking twice would train on it twice."""
    engines = ScriptedEngines("at random", slots=60)
    sampler = make_sampler(
        engines, num_prompts=1000, saved_groups="all", max_staleness=max_staleness
    )
    batches = take(sampler, 8)
    settled = [s.group.order for b in batches for s in b.saved if not s.from_reserve]
    assert len(settled) == len(set(settled))
    trained = [group.order for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 64
    assert set(range(max(trained) - 40)) <= set(settled)


def test_the_counts_add_up_with_a_reserve_that_overflows():
    engines = ScriptedEngines("last first", slots=200)
    sampler = make_sampler(engines, max_staleness=1, reserve_limit=1)
    dropped = 0
    for batch in take(sampler, 6):
        fresh = batch.num_kept - batch.num_from_reserve
        wasted = batch.num_all_correct + batch.num_all_wrong
        assert batch.num_sampled == fresh + batch.num_to_reserve + batch.num_dropped + wasted
        dropped += batch.num_dropped
    assert dropped > 0


def test_the_metrics_are_about_all_responses_of_the_step():
    """Over the kept groups alone, accuracy would be near a half whatever the policy can do."""
    engines = ScriptedEngines()
    sampler = make_sampler(engines, bound=RARE, num_prompts=500, max_asked_per_prompt=40.0)
    batch = sampler.next_batch()
    assert batch.num_sampled == max(group.order for group in batch.groups) + 1
    assert batch.num_all_wrong > 4 * batch.num_kept
    responses = all_responses(batch, sampler, engines)
    lengths = [len(text) for text in responses]
    right = [sum(map(int, text)) >= RARE for text in responses]
    assert batch.accuracy == np.mean(right) < 0.1
    assert batch.reward_mean == pytest.approx(2 * np.mean(right) - 1)
    assert sorted(batch.response_lengths) == sorted(lengths)
    assert batch.truncated_fraction == np.mean([n == MAX_TOKENS for n in lengths]) > 0
    assert batch.num_tokens == sum(lengths)


def all_responses(batch, sampler, engines) -> list[str]:
    """Ask once more for what the sampler asked for, from the names of its groups."""
    from megadapo.rollout.requests import response_seeds
    from tests.support.scripted_engines import respond

    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
    prompts = PromptStream(make_prompts(500), 0)
    return [
        respond(seed, settings).text
        for order in range(batch.num_sampled)
        for seed in response_seeds(3, 0, "train", order, prompts.at(order).id)
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
    config = {"max_staleness": 1, "reserve_limit": 1, "bound": 35, "max_accuracy": 0.5}
    engines = ScriptedEngines("last first", slots=300)
    batches = take(make_sampler(engines, saved_groups="all", num_prompts=900, **config), 6)
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
        assert {id(one) for one in trained} == {id(one) for one in batch.groups}
        assert sum(sampled.from_reserve for sampled in batch.saved) == batch.num_from_reserve
    seen = Counter(sampled.fate for batch in batches for sampled in batch.saved)
    assert min(seen[fate] for fate in get_args(Fate)) > 0, f"not all fates were tried: {seen}"


def test_nothing_is_saved_unless_a_number_is_named():
    """Another default would hold texts that nobody asked for."""
    (batch,) = take(make_sampler(ScriptedEngines()), 1)
    assert batch.num_kept == 8 and batch.saved == ()


def test_what_is_saved_changes_nothing_else():
    few, every = (
        take(make_sampler(ScriptedEngines(), saved_groups=limit), 4) for limit in (2, "all")
    )
    assert [len(batch.saved) for batch in few] == [2] * 4
    assert contents([replace(batch, saved=()) for batch in few]) == contents(
        [replace(batch, saved=()) for batch in every]
    )


def test_a_group_keeps_what_the_verifier_read():
    group = make_sampler(ScriptedEngines()).next_batch().groups[0]
    assert group.answers == tuple(sample.text[-1:] for sample in group.samples)
    assert group.symbolic_correct == (None, None, None)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_staleness": 2},
        {"mode": "partial", "max_staleness": 2},
        {"rest_after": 1, "longest_first": True},
    ],
    ids=["sync", "reserve", "partial", "memory"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(stop_after, config):
    """Also twice in a row, with a reserve that is not empty and across an epoch's end."""
    config = {"num_prompts": 31, **config}
    sampler = make_sampler(ScriptedEngines(slots=200, at_once=5), **config)
    expected = take(sampler, 7)
    batches: list[SampledBatch] = []
    state = make_sampler(ScriptedEngines(slots=200, at_once=5), **config).state_dict()
    while len(batches) < 7:
        engines = ScriptedEngines(slots=200, at_once=5)
        engines.policy_version += len(batches)
        resumed = make_sampler(engines, **config)
        resumed.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        batches += take(resumed, min(stop_after, 7 - len(batches)))
        state = resumed.state_dict()
    assert contents(batches) == contents(expected)
    assert state == sampler.state_dict()
    stale = any(batch.num_from_reserve for batch in expected)
    assert stale == (config.get("max_staleness", 0) > 0)


def test_another_seed_draws_other_responses():
    assert contents(take(make_sampler(ScriptedEngines(), seed=0), 1)) != contents(
        take(make_sampler(ScriptedEngines(), seed=1), 1)
    )


@pytest.mark.parametrize("key", ["drawing", "difficulty", "reserve", "unfinished"])
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
    assert len(engines.asked) == 40


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
    """Hands the first group back at once and the others only after it has been scored."""

    def __init__(self, scored: threading.Event) -> None:
        super().__init__()
        self._scored = scored

    def finished(self, timeout_s=None):
        if self.num_handed_back == 1:
            assert self._scored.wait(timeout=10), "nothing was scored while the others ran"
        return super().finished(timeout_s)


def test_scoring_runs_while_generation_goes_on():
    scored = threading.Event()

    class Judge(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            scored.set()
            return super().score_group(prompt, texts, token_ids)

    sampler = make_sampler(WaitsForTheJudge(scored), judge=Judge(HALF))
    assert sampler.next_batch().num_kept == 8


def test_the_time_of_scoring_is_that_of_all_groups():

    class Slow(RightAtLeast):
        seconds = 0.0

        def score_group(self, prompt, texts, token_ids):
            start = time.perf_counter()
            time.sleep(0.001)
            scores = super().score_group(prompt, texts, token_ids)
            self.seconds += time.perf_counter() - start
            return scores

    engines, judge = ScriptedEngines(), Slow(RARE)
    sampler = make_sampler(engines, num_prompts=500, max_asked_per_prompt=40.0, judge=judge)
    batch = sampler.next_batch()
    assert judge.seconds <= batch.reward_seconds < 2 * judge.seconds


def test_a_failing_verifier_ends_the_step():
    """An exception in the scoring thread must not be lost."""

    class Broken:
        num_threads = 1

        def score_group(self, prompt, texts, token_ids):
            raise ValueError("no score")

    sampler = make_sampler(ScriptedEngines(), judge=Broken())
    with pytest.raises(ValueError, match="no score"):
        sampler.next_batch()


def test_parts_of_rewards_are_means_over_the_responses_that_have_them():
    class Parts(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            scores = super().score_group(prompt, texts, token_ids)
            assert [len(ids) > 0 for ids in token_ids] == [True] * len(texts)
            parts = [(("all", float(i)), *[("first", 7.0)] * (i == 0)) for i in range(len(texts))]
            return [replace(one, parts=those) for one, those in zip(scores, parts, strict=True)]

    batch = make_sampler(ScriptedEngines(), judge=Parts(HALF)).next_batch()
    size = len(batch.groups[0].samples)
    assert batch.reward_parts == {"all": (size - 1) / 2, "first": 7.0}
