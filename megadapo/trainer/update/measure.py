"""What an update is asked to remember: log-probs and advantages of some sequences' tokens, and what
each rank had to do.

No pass is made for it: they are those that the update computes anyway.
"""

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
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.types import RankShare, RecordedTokens
from megadapo.trainer.update.metrics import MiniBatchSums


class UpdateRecorder:
    """Collects on one rank; without sequences it touches no tensor."""

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
        """Count what the rank computes of the step, and what a pass over it took."""
        self._num_tokens += sum(micro_batch.num_tokens for micro_batch in micro_batches)
        self._seconds += seconds

    def add_update(
        self,
        micro_batches: Sequence[MicroBatch],
        held: Sequence[OldPolicy],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Take what one update had of the wanted sequences.

        Args:
            micro_batches: of the update.
            held: what each of them was held against.
            logprobs: [T] of each of them.
        """
        if not len(self._places):
            return
        for micro_batch, old, present in zip(micro_batches, held, logprobs, strict=True):
            slots = np.searchsorted(self._places, micro_batch.source)
            slots = np.minimum(slots, len(self._places) - 1)
            wanted = self._places[slots] == micro_batch.source
            if not wanted.any():
                continue
            kept = [(self._old, old.logprobs), (self._update, present)]
            if old.advantages is not None:
                kept.append((self._advantages, old.advantages))
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


PROBED_SHARE = 1 / 64
"""Most of a rank's tokens of a step that are scored twice, but for the first sequence; forward
passes are at most a third of a step's work, so this is below a hundredth of it."""

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ShapeProbe:
    """Some sequences of one of a rank's micro-batches at a second shape."""

    place: int
    """Which of the micro-batches they are of."""
    micro_batch: MicroBatch
    """They alone."""
    logprobs: Tensor | None
    """[T] of `micro_batch`; None on ranks that compute none."""

    def add_to(
        self, sums: MiniBatchSums, micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]
    ) -> None:
        """Compare with the same weights' log-probs [T] of each of the rank's micro-batches."""
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
        engine = _beyond(probed.logprobs_rollout, first, second)[probed.is_current]
        if len(engine):
            sums.num_probed_fresh += len(engine)
            sums.engine_difference += engine.sum(dtype=torch.float64).item()
            sums.max_engine_difference = engine.max().item()


def probe_shape(
    cut: Sequence[MiniBatch],
    *,
    build: Callable[[np.ndarray], MicroBatch],
    score: Callable[[Sequence[MicroBatch]], list[Tensor]],
    multiple_of: int,
) -> ShapeProbe:
    """Score some sequences of the step's first mini-batch again; collective, as `score` is.

    Args:
        cut: the rank's part of each mini-batch.
        build: makes the micro-batch of some of the batch's sequences.
        score: the log-probs [T] of micro-batches, none at all where this rank has none.
        multiple_of: how many micro-batches can be scored at a time.
    """
    num_tokens = sum(mini_batch.num_tokens for mini_batch in cut)
    place, members = _chosen(cut[0] if cut else [], PROBED_SHARE * num_tokens)
    micro_batch = build(members)
    filling = [build(_NOTHING) for _ in range(multiple_of - 1)]
    scored = score([micro_batch, *filling])
    return ShapeProbe(place=place, micro_batch=micro_batch, logprobs=scored[0] if scored else None)


def _chosen(micro_batches: Sequence[MicroBatch], max_tokens: float) -> tuple[int, np.ndarray]:
    """Sequences that share a micro-batch with others, fresh ones if there are any."""
    for place, micro_batch in enumerate(micro_batches):
        # of all context-parallel ranks' tokens, so that they choose alike
        whole = micro_batch.whole
        some = whole.is_current if whole.is_current.any() else slice(None)
        known = np.unique(whole.sequences[some])
        if len(micro_batch.members) > 1 and len(known):
            ends = np.cumsum(micro_batch.lengths[known])
            # never all of them, which would be the same shape again
            most = len(micro_batch.members) - 1
            count = min(max(1, int((ends <= max_tokens).sum())), most)
            return place, micro_batch.members[known[:count]]
    return 0, _NOTHING


def _beyond(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """How far each value is outside of what lies between two others: shape explains no more."""
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    return (values - values.clamp(low, high)).abs()
