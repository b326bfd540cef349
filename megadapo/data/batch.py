"""The packed batch of one training step, made of groups of responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from megadapo.algorithm.advantages import Advantages
from megadapo.algorithm.mini_batches import mini_batches, spread_stale
from megadapo.data.group import NO_VERSION, Group, Response


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Flat tokens of S sequences (T in all), each a prompt followed by its response; no padding.

    Entry t of a per-token array belongs to token t. The hidden state that predicts token t is the
    one at t - 1 of the same sequence.
    """

    tokens: np.ndarray  # [T] int64
    cu_seqlens: np.ndarray  # [S + 1] int64, sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]]
    prompt_lengths: np.ndarray  # [S] int64
    logprobs_rollout: np.ndarray  # [T] float32, NaN on prompt tokens and tool output
    advantages: np.ndarray  # [T] float32, 0 on prompt tokens
    loss_weights: np.ndarray  # [T] float32, 0 on prompts, tool output and filtered responses
    policy_versions: np.ndarray  # [T] int32, NO_VERSION on prompt tokens and tool output
    mini_batches: tuple[np.ndarray, ...]  # sequence indices of each optimizer update, in order
    rewards: np.ndarray  # [S] float64, shaped
    group_sizes: np.ndarray  # [K] int64, sequences of each group, in order
    recorded: Sequence[int] = ()
    """Sequences whose log-probs the update returns, for saved rollouts and the parity probe;
    ascending."""
    experts: tuple[np.ndarray, ...] = ()
    """[m, layers, K] expert numbers of each sequence; empty if any sequence has none.

    They stay separate arrays: those of a large model are gigabytes."""
    logprobs_ref: np.ndarray | None = None
    """[T] float32 of the reference policy, if `megadapo whatif` knows them; None: the ranks compute
    them."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths)

    @property
    def is_trained(self) -> np.ndarray:
        """[T] bool: tokens with a loss; those without the engine's log-prob have none."""
        trained: np.ndarray = (self.loss_weights != 0.0) & np.isfinite(self.logprobs_rollout)
        return trained

    @property
    def is_sampled(self) -> np.ndarray:
        """[T] bool: the tokens after the prompts."""
        assert (self.prompt_lengths > 0).all(), "the first token of a prompt has no predecessor"
        lengths = np.diff(self.cu_seqlens)
        starts = np.repeat(self.cu_seqlens[:-1], lengths)
        sampled: np.ndarray
        sampled = np.arange(len(self.tokens)) - starts >= np.repeat(self.prompt_lengths, lengths)
        return sampled

    def tokens_with_loss(self, mini_batch: int) -> np.ndarray:
        """Return the places of a mini-batch's tokens with a loss, ascending."""
        is_member = np.isin(np.arange(self.num_sequences), self.mini_batches[mini_batch])
        return np.flatnonzero(np.repeat(is_member, np.diff(self.cu_seqlens)) & self.is_trained)

    def predicted(self, policy_version: int, *, leaves_out_stale: bool) -> np.ndarray:
        """Return [T] bool: the tokens that the policy head predicts in an update."""
        predicted = self.is_trained
        if leaves_out_stale:
            predicted &= self.version_gaps(policy_version) == 0
        return predicted

    def version_gaps(self, policy_version: int) -> np.ndarray:
        """Return [T] int32: publications between a token's sampling and `policy_version`.

        Tokens that no policy sampled have 0.
        """
        versions = self.policy_versions
        return np.where(versions == NO_VERSION, 0, policy_version - versions)


def in_training_order(
    groups: Sequence[Group], policy_version: int, groups_per_mini_batch: int
) -> tuple[Group, ...]:
    """Return a step's groups by prompt index, with stale groups spread over the mini-batches.

    A group is stale if weights before `policy_version`, the ones in training, sampled any token.
    """
    ordered = sorted(groups, key=lambda group: group.prompt_index)
    is_stale = [group.oldest_version < policy_version for group in ordered]
    return tuple(ordered[i] for i in spread_stale(is_stale, groups_per_mini_batch))


def pack(
    groups: Sequence[Group],
    advantages: Advantages,
    loss_weights: np.ndarray,
    *,
    mini_batch_size: int,
    rewards: np.ndarray,
    group_size: int | None = None,
) -> PackedBatch:
    """Pack the S responses of one step's groups, in order.

    Args:
        advantages: [S], one per response for all of its tokens; or S arrays with one per token.
        loss_weights: [S] weight of each sampled token of a response.
        mini_batch_size: number of responses in one optimizer update.
        rewards: [S] shaped rewards, for trainers that compute advantages themselves.
        group_size: planned responses per group; None: those of the largest group.
    """
    return pack_responses(
        [group.prompt_ids for group in groups for _ in group.responses],
        [response for group in groups for response in group.responses],
        advantages,
        loss_weights,
        mini_batch_size=mini_batch_size,
        rewards=rewards,
        group_sizes=[len(group.responses) for group in groups],
        planned=group_size,
    )


def pack_responses(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    advantages: Advantages,
    loss_weights: np.ndarray,
    *,
    mini_batch_size: int,
    rewards: Advantages | None = None,
    group_sizes: Sequence[int] | None = None,
    planned: int | None = None,
) -> PackedBatch:
    """Pack S responses with their prompts; the other arguments are those of `pack`.

    Args:
        rewards: by default the advantages, one per response.
        group_sizes: number of responses of each group; by default each is a group of its own.
        planned: responses per group as planned.
    """
    rewards = advantages if rewards is None else rewards
    group_sizes = [1] * len(responses) if group_sizes is None else group_sizes
    prompt_lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    lengths = np.array([len(response.token_ids) for response in responses], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + lengths)])
    starts = (cu_seqlens[1:] - lengths).tolist()
    on_responses = partial(_on_responses, starts, cu_seqlens[1:].tolist())
    experts = tuple(response.experts for response in responses if response.experts is not None)
    tokens = on_responses((response.token_ids for response in responses), 0, np.int64)
    for first, start, prompt in zip(cu_seqlens.tolist(), starts, prompts, strict=False):
        tokens[first:start] = prompt
    versions = on_responses(
        (response.policy_versions for response in responses), NO_VERSION, np.int32
    )
    weights = on_responses(loss_weights, 0.0, np.float32)
    weights[versions == NO_VERSION] = 0.0
    return PackedBatch(
        tokens=tokens,
        cu_seqlens=cu_seqlens.astype(np.int64),
        prompt_lengths=prompt_lengths,
        logprobs_rollout=on_responses(
            (response.logprobs for response in responses), np.nan, np.float32
        ),
        advantages=on_responses(advantages, 0.0, np.float32),
        loss_weights=weights,
        policy_versions=versions,
        mini_batches=mini_batches(group_sizes, mini_batch_size, planned=planned),
        rewards=np.asarray(rewards, dtype=np.float64),
        group_sizes=np.array(group_sizes, dtype=np.int64),
        experts=experts if len(experts) == len(responses) else (),
    )


def _on_responses(
    starts: Sequence[int],
    ends: Sequence[int],
    values: Iterable[np.ndarray | float],
    fill: float,
    dtype: DTypeLike,
) -> np.ndarray:
    """Return [T] values: those of a response on its tokens, `fill` on prompts."""
    spread = np.full(ends[-1] if ends else 0, fill, dtype=dtype)
    # a slice per response: masks and concatenation take several times as long
    for start, end, value in zip(starts, ends, values, strict=True):
        spread[start:end] = value
    return spread
