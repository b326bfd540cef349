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

from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.update.metrics import MiniBatchSums

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
