"""Log-probs and advantages of recorded tokens, which an update collects beside its work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.types import RecordedTokens


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
            slots = np.searchsorted(self._places, micro_batch.batch_index)
            slots = np.minimum(slots, len(self._places) - 1)
            wanted = self._places[slots] == micro_batch.batch_index
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
