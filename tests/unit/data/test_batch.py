"""The packed batch: every token in its place, weights from whole mini-batches."""

from dataclasses import replace

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages, response_rewards
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.data.batch import PackedBatch, pack, pack_responses
from megadapo.data.group import NO_VERSION, Group, Response, Score
from megadapo.data.prompts import Prompt

PROMPT = Prompt("id", (("user", "1+1=?"),), "2", "test")


def with_output(one: Group, response: int, place: slice) -> Group:
    """Return the group with some tokens of a response replaced by tool output."""
    responses = list(one.responses)
    versions = responses[response].policy_versions.copy()
    logprobs = responses[response].logprobs.copy()
    versions[place], logprobs[place] = NO_VERSION, np.nan
    responses[response] = replace(responses[response], policy_versions=versions, logprobs=logprobs)
    return replace(one, responses=tuple(responses))


def group(index: int, lengths: list[int], correct: list[bool], finish: str = "stop") -> Group:
    responses = tuple(
        Response(
            token_ids=np.arange(10, 10 + n, dtype=np.int32),
            logprobs=-0.1 * np.arange(n, dtype=np.float32),
            finish_reason=finish,
            policy_versions=np.full(n, index, dtype=np.int32),
            text="",
        )
        for n in lengths
    )
    return Group(
        prompt_index=index,
        prompt=PROMPT,
        prompt_ids=(1, 2, 3)[: index + 1],
        responses=responses,
        scores=tuple(Score(1.0 if c else -1.0, c, "") for c in correct),
    )


def pack_loose(
    groups: list[Group],
    advantages: np.ndarray,
    *,
    mini_batch_size: int,
    responses: list[Response] | None = None,
) -> PackedBatch:
    """Pack responses without their groups."""
    return pack_responses(
        [one.prompt_ids for one in groups for _ in one.responses],
        responses or [response for one in groups for response in one.responses],
        advantages,
        np.ones(len(advantages)),
        mini_batch_size=mini_batch_size,
    )


GROUPS = [group(0, [4, 2], [True, False]), group(1, [1, 3], [False, True])]


def packed(groups: list[Group] = GROUPS, **changes: object) -> PackedBatch:
    config = AlgorithmConfig(**{"responses_per_mini_batch": 2, "overlong_buffer": 0, **changes})
    return pack(
        groups,
        advantages(groups, config, max_response_tokens=4),
        loss_weights(groups, config),
        mini_batch_size=config.responses_per_mini_batch,
        rewards=response_rewards(groups, config, max_response_tokens=4),
    )


def test_tokens_are_at_cu_seqlens():
    batch = packed()
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 11, 16]
    assert batch.tokens.tolist() == [1, 10, 11, 12, 13, 1, 10, 11, 1, 2, 10, 1, 2, 10, 11, 12]
    assert batch.prompt_lengths.tolist() == [1, 1, 2, 2]
    versions = [-1, 0, 0, 0, 0, -1, 0, 0, -1, -1, 1, -1, -1, 1, 1, 1]
    assert batch.policy_versions.tolist() == versions


def test_array_types():
    """Wider types would double the data sent to every rank."""
    batch = packed()
    for name in ("tokens", "cu_seqlens", "prompt_lengths"):
        assert getattr(batch, name).dtype == np.int64
    for name in ("logprobs_rollout", "advantages", "loss_weights"):
        assert getattr(batch, name).dtype == np.float32
    assert batch.policy_versions.dtype == np.int32


def test_prompt_tokens_are_not_trained_on():
    batch = packed()
    prompt = np.array([1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0], bool)
    assert (batch.loss_weights[prompt] == 0).all() and (batch.loss_weights[~prompt] > 0).all()
    assert (batch.advantages[prompt] == 0).all() and (batch.advantages[~prompt] != 0).all()
    assert np.isnan(batch.logprobs_rollout[prompt]).all()
    np.testing.assert_allclose(batch.logprobs_rollout[1:5], [0, -0.1, -0.2, -0.3], rtol=1e-6)


def test_tool_output_is_not_trained_on():
    """Its length still counts for the overlong punishment, as for the length limit."""
    used = [with_output(GROUPS[0], 0, slice(1, 3)), with_output(GROUPS[1], 1, slice(2, 3))]
    assert [one.lengths for one in used] == [(4, 2), (1, 3)]
    assert [one.num_sampled for one in used] == [(2, 2), (1, 2)]
    assert [one.oldest_version for one in used] == [0, 1]
    batch = packed(used, responses_per_mini_batch=4)
    weights = [0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0]
    np.testing.assert_allclose(batch.loss_weights, np.array(weights) / 7, rtol=1e-6)
    by_length = packed(used, responses_per_mini_batch=4, loss_aggregation="seq-mean-token-mean")
    assert by_length.loss_weights[13] == pytest.approx(1 / 8)
    punished = AlgorithmConfig(responses_per_mini_batch=4, overlong_buffer=2)
    assert response_rewards(used, punished, max_response_tokens=5).tolist() == [0.5, -1, -1, 1]


def test_advantages_per_token():
    advantages_of_tokens = [np.arange(n) + 0.5 for n in (4, 2, 1, 3)]
    batch = pack(GROUPS, advantages_of_tokens, np.ones(4), mini_batch_size=4, rewards=np.zeros(4))
    expected = [0, 0.5, 1.5, 2.5, 3.5, 0, 0.5, 1.5, 0, 0, 0.5, 0, 0, 0.5, 1.5, 2.5]
    assert batch.advantages.tolist() == expected


def test_loss_weights_normalise_per_mini_batch():
    weights = packed().loss_weights
    assert weights.sum() == pytest.approx(2.0, rel=1e-6)
    np.testing.assert_allclose(weights[1:5], 1 / 6, rtol=1e-6)
    np.testing.assert_allclose(weights[13:16], 1 / 4, rtol=1e-6)


def test_step_scores_give_advantages_per_token():
    steps = (((1, 1.0), (4, 0.0)), ((2, 0.5),))
    scores = zip(GROUPS[0].scores, steps, strict=True)
    scored = tuple(replace(score, steps=own) for score, own in scores)
    groups = [replace(GROUPS[0], scores=scored), GROUPS[1]]
    a, b = 1.0, np.sqrt(0.5)
    batch = packed(groups, advantage="grpo-process")
    expected = [0, 0.0, -a, -a, -a, 0, 0.0, 0.0, 0, 0, -b, 0, 0, b, b, b]
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-7)


def test_mini_batches_partition_sequences_in_order():
    """Three groups with at most two per update; without groups, responses count alone."""
    three = [*GROUPS, group(2, [2, 2], [True, False])]
    batch = packed(three, responses_per_mini_batch=4)
    assert [m.tolist() for m in batch.mini_batches] == [[0, 1, 2, 3], [4, 5]]
    # loss weights count over those same responses
    assert batch.loss_weights.sum() == pytest.approx(2.0, rel=1e-6)
    loose = pack_loose(three, np.ones(6), mini_batch_size=4)
    assert [m.tolist() for m in loose.mini_batches] == [[0, 1, 2], [3, 4, 5]]


def test_experts_are_packed_for_all_responses_or_none() -> None:
    """A trainer that needs them must not fail in the middle of an update."""
    plain = [response for one in GROUPS for response in one.responses]
    routed = [
        replace(response, experts=np.full((number + 1, 2, 3), number, dtype=np.uint8))
        for number, response in enumerate(plain)
    ]
    for case, expected in ((routed, [0, 1, 2, 3]), ([*routed[:3], plain[3]], []), (plain, [])):
        batch = pack_loose(GROUPS, np.ones(4), mini_batch_size=2, responses=case)
        assert [int(one.flat[0]) for one in batch.experts] == expected


def test_rewards_and_group_sizes_are_in_order():
    """Ranks that subtract a KL term from rewards compare the responses of a group."""
    batch = packed()
    assert batch.rewards.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert batch.group_sizes.tolist() == [2, 2]
    loose = pack_loose(GROUPS, np.arange(4.0), mini_batch_size=4)
    assert loose.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loose.group_sizes.tolist() == [1, 1, 1, 1]


def test_overlong_punishment_and_filtering():
    truncated = [group(0, [4, 2], [True, False], finish="length")]
    soft = packed(truncated, overlong_buffer=2)
    # rewards 1 - 1 and -1: still one above the other, by half the distance
    assert soft.advantages[1] == pytest.approx(1 / np.sqrt(2))
    hard = packed(truncated, overlong_filtering=True)
    assert (hard.loss_weights == 0).all()
