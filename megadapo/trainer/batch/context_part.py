"""Which tokens of every sequence a rank of a context-parallel group has.

A sequence is padded to a multiple of 2 x CP tokens and cut in as many equal chunks. Rank r has
chunks r and 2 x CP - 1 - r, an early one that attends to little and a late one that attends to
much, so that all ranks have as much to do. megatron-core and Transformer Engine take this order
for given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ContextPart:
    """Of rank `rank` among `size`."""

    rank: int
    size: int

    @property
    def chunks_per_sequence(self) -> int:
        """What the length of every packed sequence must be a multiple of."""
        return 2 * self.size if self.size > 1 else 1

    def places(self, lengths: Sequence[int]) -> np.ndarray:
        """[T] int64: places of the rank's tokens among those of all ranks, ascending.

        Args:
            lengths: of the packed sequences, each a multiple of `chunks_per_sequence`.
        """
        if self.size == 1:
            return np.arange(sum(lengths))
        pieces, start = [np.empty(0, dtype=np.int64)], 0
        for length in lengths:
            chunk, rest = divmod(length, self.chunks_per_sequence)
            assert not rest, "sequences are padded before they are cut"
            for number in (self.rank, self.chunks_per_sequence - 1 - self.rank):
                pieces.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
            start += length
        return np.concatenate(pieces)


ALL = ContextPart(0, 1)
"""Whole sequences, where no other rank shares them."""
