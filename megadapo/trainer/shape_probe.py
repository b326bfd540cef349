"""How much of trainer/engine disagreement is the shape of a micro-batch alone.

Matrix products round differently at different shapes, so the trainer itself gives a token another
log-prob in another micro-batch. A few sequences are scored a second time, alone, with the weights
that gave the old log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadapo.trainer.metrics import MiniBatchSums
from megadapo.trainer.micro_batch import MicroBatch

PROBED_SHARE = 1 / 64
"""Most of a rank's tokens of a step that are scored twice, but for the first sequence; forward
passes are at most a third of a step's work, so this is below a hundredth of it."""


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
        probed, original = self.micro_batch, micro_batches[self.place]
        if self.logprobs is None or not len(probed.source):
            return
        again = torch.from_numpy(np.isin(original.source, probed.source)).to(probed.rows.device)
        first = logprobs[self.place][original.rows[again]][probed.is_current]
        second = self.logprobs[probed.rows][probed.is_current]
        engine = probed.logprobs_rollout[probed.is_current]
        shape = (first - second).abs()
        # what lies between the two is explained by shape, and only what is beyond is not
        beyond = torch.minimum((engine - first).abs(), (engine - second).abs())
        between = (engine - first) * (engine - second) <= 0
        beyond = beyond.masked_fill(between, 0.0)
        sums.num_probed += len(shape)
        sums.shape_difference += shape.sum(dtype=torch.float64).item()
        sums.engine_difference += beyond.sum(dtype=torch.float64).item()
        sums.max_shape_difference = shape.max().item()
        sums.max_engine_difference = beyond.max().item()


def probe_shape(
    micro_batches: Sequence[MicroBatch],
    *,
    max_tokens: float,
    build: Callable[[np.ndarray], MicroBatch],
    score: Callable[[MicroBatch], Tensor | None],
) -> ShapeProbe:
    """Score some sequences with fresh tokens again; collective, as `score` is.

    Args:
        micro_batches: the rank's, of the step's first mini-batch.
        max_tokens: to score, unless the first sequence has more.
        build: makes the micro-batch of some of the batch's sequences.
        score: the log-probs [T] of a micro-batch, None where this rank has none.
    """
    place, sequences = _chosen(micro_batches, max_tokens)
    micro_batch = build(sequences)
    return ShapeProbe(place=place, micro_batch=micro_batch, logprobs=score(micro_batch))


def _chosen(micro_batches: Sequence[MicroBatch], max_tokens: float) -> tuple[int, np.ndarray]:
    """Sequences with fresh tokens that share a micro-batch with others; none if there are none."""
    for place, micro_batch in enumerate(micro_batches):
        fresh = np.unique(micro_batch.sequences[micro_batch.is_current.cpu().numpy()])
        if len(micro_batch.members) > 1 and len(fresh):
            ends = np.cumsum(micro_batch.lengths[fresh])
            # never all of them, which would be the same shape again
            count = min(max(1, int((ends <= max_tokens).sum())), len(micro_batch.members) - 1)
            return place, micro_batch.members[fresh[:count]]
    return 0, np.empty(0, dtype=np.int64)
