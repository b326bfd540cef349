"""Measurements beside an update: log-probs of recorded tokens, and the effect of batch shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MicroBatchSplitter, MiniBatch
from megadapo.trainer.types import RecordedTokens, UpdateRequest
from megadapo.trainer.update.metrics import MiniBatchSums

PROBED_SHARE = 1 / 64
"""Largest share of a rank's tokens that are scored twice; one sequence is always allowed. Forward
passes are at most a third of a step's work, so this costs less than a hundredth of it."""

_NO_MEMBERS = np.empty(0, dtype=np.int64)


class UpdateRecorder:
    """Collects log-probs and advantages of some sequences.

    It adds no pass over the model and, without sequences, reads no tensor.
    """

    def __init__(self, batch: PackedBatch, sequences: Sequence[int]) -> None:
        """`sequences`: ascending indices into the batch."""
        starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
        self._places = np.concatenate(
            [np.empty(0, dtype=np.int64)]
            + [np.arange(starts[i], batch.cu_seqlens[i + 1]) for i in sequences]
        )
        self._old = np.full(len(self._places), np.nan, dtype=np.float32)
        self._proximal = self._old.copy()
        self._update = self._old.copy()
        self._advantages = self._old.copy()

    def add_update(self, micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> None:
        """Record the sequences of one update.

        Args:
            logprobs: [T] of each micro-batch; empty except on the last pipeline stage.
        """
        if not len(self._places):
            return
        for micro_batch, current in zip(micro_batches, logprobs, strict=False):
            slots = np.searchsorted(self._places, micro_batch.source)
            slots = np.minimum(slots, len(self._places) - 1)
            wanted = self._places[slots] == micro_batch.source
            if not wanted.any():
                continue
            old, proximal = micro_batch.logprobs_old, micro_batch.proximal
            assert old is not None and proximal is not None, "computed before the first update"
            kept = [(self._old, old), (self._proximal, proximal), (self._update, current)]
            if micro_batch.has_computed_advantages:
                kept.append((self._advantages, micro_batch.advantages))
            for values, found in kept:
                values[slots[wanted]] = found[micro_batch.rows].cpu().numpy()[wanted]

    def tokens(self) -> RecordedTokens:
        return RecordedTokens(
            old=self._old,
            proximal=self._proximal,
            update=self._update,
            advantages=self._advantages,
        )


Probe = Callable[[Sequence[MicroBatch]], MiniBatchSums]
"""A comparison of the first mini-batch's old log-probs with those in another micro-batch."""


def probe_shape(
    split: Sequence[MiniBatch],
    splitter: MicroBatchSplitter,
    request: UpdateRequest,
    *,
    predicted: np.ndarray,
    score: Callable[[Sequence[MicroBatch]], list[Tensor]],
) -> Probe:
    """Score some sequences of the first mini-batch in their own micro-batch; collective.

    Matrix products round differently at different shapes, so the trainer itself gives a token
    another log-prob in another micro-batch. That part of the trainer/engine gap is measured here.

    Args:
        split: the rank's part of each mini-batch; the weights still are those of its old policy.
        predicted: [tokens of the batch] bool, tokens that the head predicts.
        score: computes log-probs [T] of micro-batches; an empty list on ranks that have none.

    Returns:
        A comparison with the first mini-batch, which has its old policy by then.
    """

    def build(members: np.ndarray) -> MicroBatch:
        return splitter.micro_batch(
            request.batch, members, predicted=predicted, policy_version=request.policy_version
        )

    num_tokens = sum(mini_batch.num_tokens for mini_batch in split)
    place, members = _chosen(split[0] if split else [], PROBED_SHARE * num_tokens)
    probed = build(members)
    padding = [build(_NO_MEMBERS) for _ in range(splitter.multiple_of - 1)]
    scored = score([probed, *padding])

    def compare(first: Sequence[MicroBatch]) -> MiniBatchSums:
        if not scored or not len(probed.source):
            return MiniBatchSums()
        return _shape_sums(first[place], probed, scored[0])

    return compare


def no_probe(first: Sequence[MicroBatch]) -> MiniBatchSums:
    """Compare nothing, for a loss without an old policy."""
    return MiniBatchSums()


def _shape_sums(original: MicroBatch, probed: MicroBatch, scored: Tensor) -> MiniBatchSums:
    """Return the differences between the old log-probs of the same tokens in two micro-batches."""
    sums = MiniBatchSums()
    again = torch.from_numpy(np.isin(original.source, probed.source)).to(probed.rows.device)
    assert original.proximal is not None, "the first update sets it at the latest"
    first = original.proximal[original.rows[again]]
    second = scored[probed.rows]
    shape = (first - second).abs()
    sums.num_probed = len(shape)
    sums.shape_difference = shape.sum(dtype=torch.float64).item()
    sums.max_shape_difference = shape.max().item()
    # the distance to the interval between the two values is what the shape cannot explain
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    engine = (probed.logprobs_rollout - probed.logprobs_rollout.clamp(low, high)).abs()
    fresh = engine[probed.is_current]
    if len(fresh):
        sums.num_probed_fresh = len(fresh)
        sums.engine_difference = fresh.sum(dtype=torch.float64).item()
        sums.max_engine_difference = fresh.max().item()
    return sums


def _chosen(micro_batches: Sequence[MicroBatch], max_tokens: float) -> tuple[int, np.ndarray]:
    """Choose sequences that share a micro-batch with others, preferably fresh ones."""
    for place, micro_batch in enumerate(micro_batches):
        # tokens of all context-parallel ranks, so that they choose alike
        current = micro_batch.whole_is_current
        known = np.unique(micro_batch.whole_sequences[current if current.any() else slice(None)])
        if len(micro_batch.members) > 1 and len(known):
            ends = np.cumsum(micro_batch.lengths[known])
            # never all of them: the shape would be the same
            most = len(micro_batch.members) - 1
            count = min(max(1, int((ends <= max_tokens).sum())), most)
            return place, micro_batch.members[known[:count]]
    return 0, _NO_MEMBERS
