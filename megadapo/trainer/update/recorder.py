"""What an update is asked to remember: log-probs and advantages of some sequences' tokens, and what
each rank had to do.

No pass is made for it: they are those that the update computes anyway.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megadapo.cluster.memory import private_bytes
from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.result import RankShare, RecordedTokens


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
