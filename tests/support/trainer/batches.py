"""Packed batches of random tokens with ragged lengths, and groups that advantages are made of."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.data.pretraining import pack_pretraining

VOCAB_SIZE = 150
COVARIANCE_DRAW = (7, 1, 0)
"""Seeds of the choice of tokens by gate "clip_cov"."""
TEXT_COEF = 0.5


def random_batch(
    lengths: list[int], *, num_mini_batches: int = 1, seed: int = 0, policy_version: int = 0
) -> PackedBatch:
    """Sequences of the given lengths; about a third of each is prompt."""
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int64)
    prompt_lengths = np.maximum(1, sizes // 3)
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    is_response = np.concatenate(
        [np.arange(n) >= p for n, p in zip(sizes, prompt_lengths, strict=True)]
    )
    # off-centre, so that the loss is not a small difference of large terms
    advantages = np.repeat(rng.normal(0.7, 0.5, len(lengths)), sizes)
    mini_batches = np.array_split(np.arange(len(lengths)), num_mini_batches)
    tokens_of = np.concatenate(
        [np.full(n, is_response[a : a + n].sum()) for a, n in zip(cu_seqlens, sizes, strict=False)]
    )
    weights = 1.0 / (len(lengths) / num_mini_batches * tokens_of)
    return PackedBatch(
        tokens=rng.integers(0, VOCAB_SIZE, num_tokens),
        cu_seqlens=cu_seqlens,
        prompt_lengths=prompt_lengths,
        logprobs_rollout=np.where(is_response, -4.0, np.nan).astype(np.float32),
        advantages=np.where(is_response, advantages, 0.0).astype(np.float32),
        loss_weights=np.where(is_response, weights, 0.0).astype(np.float32),
        policy_versions=np.where(is_response, policy_version, -1).astype(np.int32),
        mini_batches=tuple(mini_batches),
        rewards=rng.normal(size=len(lengths)),
        group_sizes=np.ones(len(lengths), dtype=np.int64),
    )


def signed_batch(lengths: list[int], **options: Any) -> PackedBatch:
    """Sequences whose advantages have both signs, and differ by token."""
    batch = random_batch(lengths, **options)
    ripple = 1.0 + 0.1 * np.sin(np.arange(len(batch.tokens)))
    for index, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        first = start + batch.prompt_lengths[index]
        batch.advantages[first:stop] = (0.9, -1.4, -0.3, 0.5)[index % 4] * ripple[first:stop]
    return batch


def scored_group(lengths: Sequence[int], **fields: Any) -> SimpleNamespace:
    """A group as `[algorithm]` reads it: nothing is truncated, scored by steps or shared."""
    each = len(lengths)
    usual = {"rewards": [0.0] * each, "truncated": [False] * each, "branches": [None] * each}
    usual |= {"lengths": lengths, "num_sampled": lengths, "steps": ()}
    usual |= {"mean_logprobs": [-0.5] * each, "repetitions": [0.0] * each}
    return SimpleNamespace(**(usual | fields))


def random_texts(*updates: list[int], coef: float = TEXT_COEF) -> PackedBatch:
    """Sequences of the given lengths for each update, of random tokens."""
    rng = np.random.default_rng(7)
    parts = [[rng.integers(0, VOCAB_SIZE, n) for n in lengths] for lengths in updates]
    return pack_pretraining(parts, coef=coef)


def stale_batch(lengths: list[int], *, present: int = 7, seed: int = 0) -> PackedBatch:
    """Sequences of the present version, one and three versions old, and of all three, in turn."""
    batch = random_batch(lengths, num_mini_batches=1, seed=seed, policy_version=present)
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    for index, (start, stop) in enumerate(zip(starts, batch.cu_seqlens[1:], strict=True)):
        versions = batch.policy_versions[start:stop]
        versions[:] = (present, present - 1, present - 3, present)[index % 4]
        if index % 4 == 3:
            versions[: 2 * len(versions) // 3] = present - 1
            versions[: len(versions) // 3] = present - 3
    batch.logprobs_rollout[:] += np.random.default_rng(seed + 1).normal(
        -1.0, 0.7, len(batch.tokens)
    )
    return batch


RAGGED = [5, 61, 2, 33, 40, 7, 19, 90, 12, 28, 3, 50]
