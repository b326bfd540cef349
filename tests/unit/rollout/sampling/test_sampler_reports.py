"""Would catch: a number of some responses that passes for one of all, a group nobody sees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from megadapo.data.prompts import PromptStream
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.samplers import HALF, MAX_TOKENS, RARE, contents, make_sampler, take
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)


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
    from megadapo.rollout.types import response_seeds
    from tests.support.rollout.scripted_engines import respond

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
    assert min(seen[fate] for fate in get_args(Disposition)) > 0, (
        f"not all fates were tried: {seen}"
    )


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
