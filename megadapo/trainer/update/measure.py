"""Measurements beside an update: recorded tokens, each rank's work, and the effect of shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadapo.cluster.processes import private_bytes
from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MicroBatchSplitter, MiniBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.types import RankShare, RecordedTokens, UpdateRequest
from megadapo.trainer.update.metrics import MiniBatchSums

PROBED_SHARE = 1 / 64
"""Largest share of a rank's tokens that are scored twice; one sequence is always allowed. Forward
passes are at most a third of a step's work, so this costs less than a hundredth of it."""

_NO_MEMBERS = np.empty(0, dtype=np.int64)


class UpdateRecorder:
    """Collects log-probs and advantages of some sequences, and the work of this rank.

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
        self._update = self._old.copy()
        self._advantages = self._old.copy()
        self._num_tokens = 0
        self._seconds = 0.0

    def add_share(self, micro_batches: Sequence[MicroBatch], seconds: float) -> None:
        """Count the rank's tokens and the time of one pass over them."""
        self._num_tokens += sum(micro_batch.num_tokens for micro_batch in micro_batches)
        self._seconds += seconds

    def add_update(
        self,
        micro_batches: Sequence[MicroBatch],
        old: Sequence[OldPolicy],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Record the sequences of one update.

        Args:
            old: old policy of each micro-batch.
            logprobs: [T] of each micro-batch.
        """
        if not len(self._places):
            return
        for micro_batch, policy, current in zip(micro_batches, old, logprobs, strict=True):
            slots = np.searchsorted(self._places, micro_batch.source)
            slots = np.minimum(slots, len(self._places) - 1)
            wanted = self._places[slots] == micro_batch.source
            if not wanted.any():
                continue
            kept = [(self._old, policy.logprobs), (self._update, current)]
            if policy.advantages is not None:
                kept.append((self._advantages, policy.advantages))
            for values, found in kept:
                values[slots[wanted]] = found[micro_batch.rows].cpu().numpy()[wanted]

    def share(self) -> RankShare:
        return RankShare(
            num_tokens=self._num_tokens,
            logprobs_seconds=self._seconds,
            private_bytes=private_bytes(os.getpid()),
        )

    def tokens(self) -> RecordedTokens:
        return RecordedTokens(old=self._old, update=self._update, advantages=self._advantages)


@dataclass(frozen=True, kw_only=True)
class ShapeProbe:
    """Sequences that are scored alone as well, to show the effect of a micro-batch's shape.

    Matrix products round differently at different shapes, so the trainer itself gives a token
    another log-prob in another micro-batch. That part of the trainer/engine gap is measured here.
    """

    place: int
    """Index of their original micro-batch."""
    micro_batch: MicroBatch
    """Micro-batch of these sequences alone."""
    logprobs: Tensor | None
    """[T] of `micro_batch`; None on ranks that compute none."""

    def add_to(
        self, sums: MiniBatchSums, micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]
    ) -> None:
        """Compare with the log-probs [T] of the original micro-batches, under equal weights."""
        probed = self.micro_batch
        if self.logprobs is None or not len(probed.source):
            return
        original = micro_batches[self.place]
        again = torch.from_numpy(np.isin(original.source, probed.source)).to(probed.rows.device)
        first = logprobs[self.place][original.rows[again]]
        second = self.logprobs[probed.rows]
        shape = (first - second).abs()
        sums.num_probed += len(shape)
        sums.shape_difference += shape.sum(dtype=torch.float64).item()
        sums.max_shape_difference = shape.max().item()
        # the distance to the interval between the two values is what the shape cannot explain
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        rollout = probed.logprobs_rollout
        engine = (rollout - rollout.clamp(low, high)).abs()[probed.is_current]
        if len(engine):
            sums.num_probed_fresh += len(engine)
            sums.engine_difference += engine.sum(dtype=torch.float64).item()
            sums.max_engine_difference = engine.max().item()


def probe_shape(
    split: Sequence[MiniBatch],
    splitter: MicroBatchSplitter,
    request: UpdateRequest,
    *,
    predicted: np.ndarray,
    score: Callable[[Sequence[MicroBatch]], list[Tensor]],
) -> ShapeProbe:
    """Score some sequences of the step's first mini-batch alone; collective, as `score` is.

    Args:
        split: the rank's part of each mini-batch.
        predicted: [tokens of the batch] bool, tokens that the head predicts.
        score: computes log-probs [T] of micro-batches; an empty list on ranks that have none.
    """

    def build(members: np.ndarray) -> MicroBatch:
        return splitter.micro_batch(
            request.batch, members, predicted=predicted, policy_version=request.policy_version
        )

    num_tokens = sum(mini_batch.num_tokens for mini_batch in split)
    place, members = _chosen(split[0] if split else [], PROBED_SHARE * num_tokens)
    micro_batch = build(members)
    padding = [build(_NO_MEMBERS) for _ in range(splitter.multiple_of - 1)]
    scored = score([micro_batch, *padding])
    return ShapeProbe(place=place, micro_batch=micro_batch, logprobs=scored[0] if scored else None)


def _chosen(micro_batches: Sequence[MicroBatch], max_tokens: float) -> tuple[int, np.ndarray]:
    """Choose sequences that share a micro-batch with others, preferably fresh ones."""
    for place, micro_batch in enumerate(micro_batches):
        # tokens of all context-parallel ranks, so that they choose alike
        whole = micro_batch.whole
        some = whole.is_current if whole.is_current.any() else slice(None)
        known = np.unique(whole.sequences[some])
        if len(micro_batch.members) > 1 and len(known):
            ends = np.cumsum(micro_batch.lengths[known])
            # never all of them: the shape would be the same
            most = len(micro_batch.members) - 1
            count = min(max(1, int((ends <= max_tokens).sum())), most)
            return place, micro_batch.members[known[:count]]
    return 0, _NO_MEMBERS
