"""Endless orders of items that depend on a seed alone: of one source, and of several by weight."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class Share(NamedTuple):
    """One of several sources, whose items are stored one source after another."""

    name: str
    num_items: int
    weight: float


class EpochOrder:
    """An endless order of N items, shuffled again in each epoch, that depends on a seed alone."""

    def __init__(self, num_items: int, seed: int, *, name: str, shuffle: bool = True) -> None:
        """`name`: kind of the items; different kinds get different orders from one seed."""
        self._num_items, self._shuffle = num_items, shuffle
        self._begin = f"{name}/{seed}"
        # lookups alternate between two epochs where one ends and the next starts
        self._permutation = lru_cache(maxsize=2)(self._new_permutation)

    def at(self, index: int) -> int:
        """Return the item at a position, counted from 0 over all epochs."""
        epoch, position = divmod(index, self._num_items)
        return self._permutation(epoch)[position]

    def _new_permutation(self, epoch: int) -> list[int]:
        items = list(range(self._num_items))
        if self._shuffle:
            random.Random(f"{self._begin}/{epoch}").shuffle(items)
        return items


class WeightedOrder:
    """An endless order of several sources' items, in proportion to the sources' weights.

    Each source is in its own `EpochOrder`, so the order of one does not depend on the others, and
    a source with few items repeats earlier. A single source is in the order of `EpochOrder`.
    """

    def __init__(
        self, shares: Sequence[Share], seed: int, *, name: str, shuffle: bool = True
    ) -> None:
        self._shares = tuple(shares)
        # 0.1 is exact as a decimal number only
        exact = [Fraction(str(share.weight)) for share in shares]
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        self._starts = [0, *accumulate(share.num_items for share in shares)]
        self._orders = [
            EpochOrder(share.num_items, seed, name=own, shuffle=shuffle)
            for share in shares
            for own in (name if len(shares) == 1 else f"{name}/{share.name}",)
        ]
        self._chosen: list[tuple[int, int]] = []
        """(source, position in it) of the positions from the start of a period, as far as known."""
        self._counts = [0] * len(self._weights)

    @property
    def epoch_size(self) -> int:
        """Number of positions in which each source has come once in full."""
        return max(
            -(-share.num_items * self._period // weight)
            for share, weight in zip(self._shares, self._weights, strict=True)
        )

    def at(self, index: int) -> int:
        """Return the item at a position, counted from 0 over all epochs."""
        source, position = self._place(index)
        return self._starts[source] + self._orders[source].at(position)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the source at a position, and the position in the source."""
        period, position = divmod(index, self._period)
        while len(self._chosen) <= position:
            source = self._next_source(len(self._chosen))
            self._chosen.append((source, self._counts[source]))
            self._counts[source] += 1
        source, before = self._chosen[position]
        return source, period * self._weights[source] + before

    def _next_source(self, position: int) -> int:
        """Return the source of a position, so that every prefix is off by less than one item.

        Item j of a source with share p may come from position floor(j / p) and must come before
        position ceil((j + 1) / p). The first of these deadlines is served, which keeps all.
        """
        deadlines = [
            (-(-(count + 1) * self._period // weight), source)
            for source, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * self._period // weight <= position
        ]
        return min(deadlines)[1]
