"""The packed batch: every token in its place, weights from whole mini-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages, response_rewards
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.data.batch import Group, PackedBatch, Sample, pack, pack_samples
from megadapo.data.policy_versions import NO_VERSION
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError

PROMPT = Prompt("id", (("user", "1+1=?"),), "2", "test")


def with_output(one: Group, response: int, place: slice) -> Group:
    """The group with some tokens of a response being what a tool put out."""
    samples = list(one.samples)
    versions = samples[response].policy_versions.copy()
    logprobs = samples[response].logprobs_rollout.copy()
    versions[place], logprobs[place] = NO_VERSION, np.nan
    samples[response] = replace(
        samples[response], policy_versions=versions, logprobs_rollout=logprobs
    )
    return replace(one, samples=tuple(samples))


def group(order: int, lengths: list[int], correct: list[bool], finish: str = "stop") -> Group:
    samples = tuple(
        Sample(
            prompt_ids=(1, 2, 3)[: order + 1],
            response_ids=np.arange(10, 10 + n, dtype=np.int32),
            logprobs_rollout=-0.1 * np.arange(n, dtype=np.float32),
            finish_reason=finish,
            policy_versions=np.full(n, order, dtype=np.int32),
            text="",
        )
        for n in lengths
    )
    rewards = tuple(1.0 if c else -1.0 for c in correct)
    return Group(
        order=order,
        prompt=PROMPT,
        samples=samples,
        rewards=rewards,
        correct=tuple(correct),
        answers=("",) * len(lengths),
        symbolic_correct=(None,) * len(lengths),
    )


GROUPS = [group(0, [4, 2], [True, False]), group(1, [1, 3], [False, True])]


def packed_step(groups: list[Group], config: AlgorithmConfig) -> PackedBatch:
    return pack(
        groups,
        advantages(groups, config, max_response_tokens=4),
        loss_weights(groups, config),
        mini_batch_size=config.responses_per_mini_batch,
        rewards=response_rewards(groups, config, max_response_tokens=4),
    )


def packed(**config):
    defaults = {"responses_per_mini_batch": 2, "overlong_buffer": 0}
    return packed_step(GROUPS, AlgorithmConfig(**(defaults | config)))


def test_tokens_lie_where_cu_seqlens_says():
    batch = packed()
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 11, 16]
    assert batch.tokens.tolist() == [1, 10, 11, 12, 13, 1, 10, 11, 1, 2, 10, 1, 2, 10, 11, 12]
    assert batch.prompt_lengths.tolist() == [1, 1, 2, 2]
    versions = [-1, 0, 0, 0, 0, -1, 0, 0, -1, -1, 1, -1, -1, 1, 1, 1]
    assert batch.policy_versions.tolist() == versions
    assert batch.num_response_tokens == 10


def test_arrays_have_the_types_that_trainers_are_sent():
    """Wider ones would double what goes to every rank; tokens of another kind index nothing."""
    batch = packed()
    for name in ("tokens", "cu_seqlens", "prompt_lengths"):
        assert getattr(batch, name).dtype == np.int64
    for name in ("logprobs_rollout", "advantages", "loss_weights"):
        assert getattr(batch, name).dtype == np.float32
    assert batch.policy_versions.dtype == np.int32


def test_prompt_tokens_have_no_weight_no_advantage_and_no_logprob():
    """A prompt token in the loss would train the model to write prompts."""
    batch = packed()
    prompt = np.array([1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0], bool)
    assert (batch.loss_weights[prompt] == 0).all() and (batch.loss_weights[~prompt] > 0).all()
    assert (batch.advantages[prompt] == 0).all() and (batch.advantages[~prompt] != 0).all()
    assert np.isnan(batch.logprobs_rollout[prompt]).all()
    np.testing.assert_allclose(batch.logprobs_rollout[1:5], [0, -0.1, -0.2, -0.3], rtol=1e-6)


def test_what_a_tool_put_out_is_in_the_response_and_in_no_sum():
    """Counted, it would shrink the others' weights; with a weight, the tool's words are learned.

    The overlong punishment goes by what was generated and given, as the length limit does.
    """
    used = [with_output(GROUPS[0], 0, slice(1, 3)), with_output(GROUPS[1], 1, slice(2, 3))]
    assert [one.lengths for one in used] == [(4, 2), (1, 3)]
    assert [one.num_sampled for one in used] == [(2, 2), (1, 2)]
    assert [one.oldest_version for one in used] == [0, 1]
    config = AlgorithmConfig(responses_per_mini_batch=4, overlong_buffer=0)
    batch = packed_step(used, config)
    weights = [0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0]
    np.testing.assert_allclose(batch.loss_weights, np.array(weights) / 7, rtol=1e-6)
    by_length = AlgorithmConfig(
        responses_per_mini_batch=4, overlong_buffer=0, loss_aggregation="seq-mean-token-mean"
    )
    assert packed_step(used, by_length).loss_weights[13] == pytest.approx(1 / 8)
    punished = AlgorithmConfig(responses_per_mini_batch=4, overlong_buffer=2)
    assert response_rewards(used, punished, max_response_tokens=5).tolist() == [0.5, -1, -1, 1]


def test_each_token_can_have_an_advantage_of_its_own():
    advantages_of_tokens = [np.arange(n) + 0.5 for n in (4, 2, 1, 3)]
    batch = pack(GROUPS, advantages_of_tokens, np.ones(4), mini_batch_size=4, rewards=np.zeros(4))
    expected = [0, 0.5, 1.5, 2.5, 3.5, 0, 0.5, 1.5, 0, 0, 0.5, 0, 0, 0.5, 1.5, 2.5]
    assert batch.advantages.tolist() == expected


def test_loss_weights_count_tokens_of_the_mini_batch_and_not_of_the_step():
    weights = packed().loss_weights
    assert weights.sum() == pytest.approx(2.0, rel=1e-6)
    np.testing.assert_allclose(weights[1:5], 1 / 6, rtol=1e-6)
    np.testing.assert_allclose(weights[13:16], 1 / 4, rtol=1e-6)


def test_tokens_can_have_advantages_of_their_own():
    """Of steps: each at its own token, none on a prompt, and no response's at another's."""
    steps = (((1, 1.0), (4, 0.0)), ((2, 0.5),))
    groups = [replace(GROUPS[0], steps=steps), GROUPS[1]]
    config = AlgorithmConfig(
        advantage="grpo-process", responses_per_mini_batch=2, overlong_buffer=0
    )
    a, b = 1.0, np.sqrt(0.5)
    batch = packed_step(groups, config)
    expected = [0, 0.0, -a, -a, -a, 0, 0.0, 0.0, 0, 0, -b, 0, 0, b, b, b]
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-7)


def test_mini_batches_cover_every_sequence_once_in_order():
    """Of three groups, at most two an update; without groups, every response is its own."""
    three = [*GROUPS, group(2, [2, 2], [True, False])]
    config = AlgorithmConfig(responses_per_mini_batch=4, overlong_buffer=0)
    batch = packed_step(three, config)
    assert [m.tolist() for m in batch.mini_batches] == [[0, 1, 2, 3], [4, 5]]
    # loss weights count over those same responses
    assert batch.loss_weights.sum() == pytest.approx(2.0, rel=1e-6)
    samples = [sample for one in three for sample in one.samples]
    loose = pack_samples(samples, np.ones(6), np.ones(6), mini_batch_size=4)
    assert [m.tolist() for m in loose.mini_batches] == [[0, 1, 2], [3, 4, 5]]


def test_experts_are_there_of_all_responses_or_of_none() -> None:
    """A trainer that is to take them over must not find out in the middle of an update."""
    samples = [sample for one in GROUPS for sample in one.samples]
    told = [
        replace(sample, experts=np.full((number + 1, 2, 3), number, dtype=np.uint8))
        for number, sample in enumerate(samples)
    ]
    ones = np.ones(len(samples))
    for case, expected in ((told, [0, 1, 2, 3]), ([*told[:3], samples[3]], []), (samples, [])):
        batch = pack_samples(case, advantages=ones, loss_weights=ones, mini_batch_size=2)
        assert [int(one.flat[0]) for one in batch.experts] == expected


def test_rewards_are_of_each_response_and_groups_in_order():
    """Ranks that take a divergence off the rewards compare the responses of a group."""
    batch = packed()
    assert batch.rewards.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert batch.group_sizes.tolist() == [2, 2]
    samples = [sample for one in GROUPS for sample in one.samples]
    loose = pack_samples(samples, np.arange(4.0), np.ones(4), mini_batch_size=4)
    assert loose.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loose.group_sizes.tolist() == [1, 1, 1, 1]


def test_soft_punishment_changes_advantages_and_filtering_changes_weights():
    truncated = [group(0, [4, 2], [True, False], finish="length")]
    soft = packed_step(truncated, AlgorithmConfig(responses_per_mini_batch=2, overlong_buffer=2))
    # rewards 1 - 1 and -1: still one above the other, by half the distance
    assert soft.advantages[1] == pytest.approx(1 / np.sqrt(2))
    hard = packed_step(
        truncated,
        AlgorithmConfig(responses_per_mini_batch=2, overlong_buffer=0, overlong_filtering=True),
    )
    assert (hard.loss_weights == 0).all()


def test_filtering_and_punishment_together_are_refused():
    with pytest.raises(ConfigError, match="overlong_filtering"):
        AlgorithmConfig(overlong_filtering=True, overlong_buffer=4096)
