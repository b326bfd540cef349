"""An endless order of items, shuffled anew in each epoch, that depends on a seed alone."""

from __future__ import annotations

import random


class EpochOrder:
    """Which of N items comes at a place, counted from 0 over all epochs."""

    def __init__(self, num_items: int, seed: int, *, name: str, shuffle: bool = True) -> None:
        """`name`: of what is ordered, so that two things with one seed are shuffled apart."""
        self._num_items = num_items
        self._seed = seed
        self._name = name
        self._shuffle = shuffle
        self._permutations: dict[int, list[int]] = {}

    def at(self, place: int) -> int:
        """The item at a place."""
        epoch, position = divmod(place, self._num_items)
        return self._permutation(epoch)[position]

    def _permutation(self, epoch: int) -> list[int]:
        """The order of an epoch; those of the two epochs looked at last stay in memory."""
        known = self._permutations.get(epoch)
        if known is None:
            known = list(range(self._num_items))
            if self._shuffle:
                random.Random(f"{self._name}/{self._seed}/{epoch}").shuffle(known)
            if len(self._permutations) == 2:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = known
        return known
