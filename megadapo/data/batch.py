"""From groups of responses to the packed batch one training step gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megadapo.algorithm.advantages import group_advantages
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import sequence_weights
from megadapo.algorithm.shaping import shaped_rewards
from megadapo.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response as the engine gave it; its tokens are never re-tokenised.

    Arrays, because 8,192 responses of 5,000 tokens are gigabytes as Python numbers.
    """

    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray  # [n] int32
    """Sampled tokens, with the end-of-sequence token where the engine emitted it."""
    logprobs_rollout: np.ndarray  # [n] float32
    """The engine's log-prob of each response token; NaN where it gave none."""
    finish_reason: Literal["stop", "length"]
    policy_version: int
    """Number of the weight publication the engine sampled from."""
    text: str
    """The response decoded without special tokens."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Group:
    """One prompt with its G responses: the unit of sampling, selection and advantage."""

    order: int
    """Position in which the group was asked for, increasing over the run."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    """The verifier's reward of each response, before any shaping."""
    correct: tuple[bool, ...]
    """Whether each response is right: what selection and accuracy look at."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Flat tokens of S sequences (T in all), each a prompt followed by its response; no padding.

    Entry t of a per-token array belongs to token t; the hidden state that predicts it is the one
    at t - 1 of the same sequence.
    """

    tokens: np.ndarray  # [T] int64
    cu_seqlens: np.ndarray  # [S + 1] int64, sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]]
    prompt_lengths: np.ndarray  # [S] int64
    logprobs_rollout: np.ndarray  # [T] float32, NaN on prompt tokens
    advantages: np.ndarray  # [T] float32, 0 on prompt tokens
    loss_weights: np.ndarray  # [T] float32, 0 on prompt tokens and on left-out responses
    policy_versions: np.ndarray  # [S] int32
    mini_batches: tuple[np.ndarray, ...]  # sequence indices of each optimizer update, in order

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_response_tokens(self) -> int:
        return int(len(self.tokens) - self.prompt_lengths.sum())


def pack(
    groups: Sequence[Group], config: AlgorithmConfig, *, max_response_tokens: int
) -> PackedBatch:
    """Pack the groups of one step, with advantages and loss weights from whole mini-batches."""
    samples = [sample for group in groups for sample in group.samples]
    group_of = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    advantages = np.concatenate(
        [_advantages(group, config, max_response_tokens) for group in groups]
    )
    return pack_samples(
        samples,
        group_of=group_of,
        advantages=advantages,
        config=config,
    )


def pack_samples(
    samples: Sequence[Sample],
    *,
    group_of: np.ndarray,
    advantages: np.ndarray,
    config: AlgorithmConfig,
) -> PackedBatch:
    """Pack responses whose advantage is already known.

    Args:
        samples: S responses.
        group_of: [S] group label of each response.
        advantages: [S] advantage of each response, given to all of its tokens.
        config: mini-batch size, loss aggregation and overlong filtering.
    """
    prompt_lengths = np.array([len(s.prompt_ids) for s in samples], dtype=np.int64)
    lengths = np.array([len(s.response_ids) for s in samples], dtype=np.int64)
    mini_batches = _mini_batches(len(samples), config.responses_per_mini_batch)
    keep = np.array([not (config.overlong_filtering and s.truncated) for s in samples])
    weights = np.zeros(len(samples))
    for indices in mini_batches:
        weights[indices] = sequence_weights(
            lengths[indices], group_of[indices], config.loss_aggregation, keep=keep[indices]
        )
    return PackedBatch(
        tokens=np.concatenate(
            [ids for s in samples for ids in (np.array(s.prompt_ids), s.response_ids)]
        ).astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(prompt_lengths + lengths)]).astype(np.int64),
        prompt_lengths=prompt_lengths,
        logprobs_rollout=_on_response(
            prompt_lengths, [s.logprobs_rollout for s in samples], fill=np.nan
        ),
        advantages=_spread(prompt_lengths, lengths, advantages),
        loss_weights=_spread(prompt_lengths, lengths, weights),
        policy_versions=np.array([s.policy_version for s in samples], dtype=np.int32),
        mini_batches=mini_batches,
    )


def _advantages(group: Group, config: AlgorithmConfig, max_response_tokens: int) -> np.ndarray:
    rewards = shaped_rewards(
        group.rewards,
        [len(sample.response_ids) for sample in group.samples],
        max_length=max_response_tokens,
        buffer=config.overlong_buffer,
        factor=config.overlong_factor,
    )
    return group_advantages(rewards, normalize_by_std=config.normalize_by_std)


def _mini_batches(num_samples: int, size: int) -> tuple[np.ndarray, ...]:
    return tuple(
        np.arange(start, min(start + size, num_samples)) for start in range(0, num_samples, size)
    )


def _spread(prompt_lengths: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One value per sequence onto its response tokens, 0 on its prompt tokens, [T] float32."""
    pieces = [np.full(n, value) for n, value in zip(lengths, values, strict=True)]
    return _on_response(prompt_lengths, pieces, fill=0.0)


def _on_response(
    prompt_lengths: np.ndarray, pieces: Sequence[np.ndarray], *, fill: float
) -> np.ndarray:
    parts: list[np.ndarray] = []
    for prompt_length, piece in zip(prompt_lengths, pieces, strict=True):
        parts += [np.full(prompt_length, fill), piece]
    return np.concatenate(parts).astype(np.float32)
