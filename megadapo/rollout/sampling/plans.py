"""When a step has asked enough, when its batch is full, and which groups are in it.

No engines, no texts, no clock: a plan sees orders (places in the prompt stream) go out and come
back. What it chooses does not depend on which of them come back first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from megadapo.rollout.sampling.asking import (
    ExpectedMixed,
    KeepRate,
    should_oversample,
    would_go_stale,
)


class Plan(ABC):
    """What one step still needs."""

    def __init__(self, num_needed: int, max_asked: int) -> None:
        """Start with nothing asked.

        Args:
            num_needed: groups with a signal that the batch lacks.
            max_asked: bound on the groups asked for in the step.
        """
        self.num_needed = num_needed
        self.num_asked = 0
        self.open: dict[int, KeepRate] = {}
        """Orders that are out, each with the yield of prompts like its own."""
        self.finished: dict[int, bool] = {}
        """Orders that came back, and whether the group has a signal."""
        self.num_with_signal = 0
        self._max_asked = max_asked
        self._num_at_once = 1
        self._num_open: Counter[KeepRate] = Counter()  # many prompts share an estimate

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether the batch can be taken."""

    @abstractmethod
    def wants(self, estimate: KeepRate) -> bool:
        """Whether to ask for one group more, of this yield, while the engines have room."""

    def cannot_make_batch(self) -> list[int]:
        """Open orders that cannot get into the batch any more."""
        return []

    @abstractmethod
    def chosen(self) -> list[int]:
        """Orders of the batch, ascending; fewer than needed where the step fell short."""

    def ask(self, order: int, estimate: KeepRate) -> None:
        """Count a group as asked for in this step."""
        self.num_asked += 1
        self._open(order, estimate)
        self._num_at_once = max(self._num_at_once, len(self.open))

    def settle(self, order: int, is_mixed: bool) -> None:
        """Count a group as come back."""
        self._close(order)
        self.finished[order] = is_mixed
        self.num_with_signal += is_mixed

    def drop(self, orders: Sequence[int]) -> None:
        """Count groups as taken back."""
        for order in orders:
            self._close(order)

    @property
    def with_signal(self) -> list[int]:
        """Finished orders that have a signal, ascending."""
        return sorted(order for order, is_mixed in self.finished.items() if is_mixed)

    @property
    def _may_ask(self) -> bool:
        return self.num_asked < self._max_asked

    def _chances(self) -> ExpectedMixed:
        chances = ExpectedMixed()
        for estimate, num_groups in self._num_open.items():
            chances.add(estimate, num_groups)
        return chances

    def _open(self, order: int, estimate: KeepRate) -> None:
        self.open[order] = estimate
        self._num_open[estimate] += 1

    def _close(self, order: int) -> None:
        self._num_open[self.open.pop(order)] -= 1


class SyncPlan(Plan):
    """The first groups with a signal in asking order; every earlier one is waited for.

    A batch of whoever finished first would be a batch of short answers.
    """

    def __init__(self, num_needed: int, max_asked: int) -> None:
        super().__init__(num_needed, max_asked)
        self._asked: list[int] = []  # ascending
        self._num_settled = 0  # of the orders asked, from the first on without a gap
        self._chosen: list[int] = []

    @property
    def is_full(self) -> bool:
        return len(self._chosen) == self.num_needed

    def wants(self, estimate: KeepRate) -> bool:
        """Whether the price of a second tail outweighs the cost of a group that may be surplus."""
        num_missing = self.num_needed - self.num_with_signal
        return self._may_ask and should_oversample(
            num_missing, self._chances(), estimate, num_at_once=self._num_at_once
        )

    def cannot_make_batch(self) -> list[int]:
        """What was asked for after the last group that is needed, as far as it is known."""
        if self.num_with_signal < self.num_needed:
            return []
        last = self.with_signal[self.num_needed - 1]
        return [order for order in self.open if order > last]

    def chosen(self) -> list[int]:
        return self._chosen

    def ask(self, order: int, estimate: KeepRate) -> None:
        super().ask(order, estimate)
        self._asked.append(order)

    def settle(self, order: int, is_mixed: bool) -> None:
        super().settle(order, is_mixed)
        while not self.is_full and self._num_settled < len(self._asked):
            first = self._asked[self._num_settled]
            if first not in self.finished:
                break
            self._num_settled += 1
            if self.finished[first]:
                self._chosen.append(first)


class RoundsPlan(Plan):
    """Rounds of a fixed number of groups; each waits for all of its answers."""

    def __init__(self, num_needed: int, max_asked: int, *, round_size: int) -> None:
        super().__init__(num_needed, max_asked)
        self._round_size = round_size
        self._num_left = 0  # of the present round, not asked for yet

    @property
    def is_full(self) -> bool:
        round_over = not self.open and not self._num_left
        return round_over and self.num_with_signal >= self.num_needed

    def wants(self, estimate: KeepRate) -> bool:
        """Whether the present round is not all asked for, or the next one begins."""
        if not self.open and not self._num_left and self._may_ask:
            self._num_left = min(self._round_size, self._max_asked - self.num_asked)
        return self._num_left > 0

    def ask(self, order: int, estimate: KeepRate) -> None:
        super().ask(order, estimate)
        self._num_left -= 1

    def chosen(self) -> list[int]:
        return self.with_signal[: self.num_needed]


class PartialPlan(Plan):
    """The first-asked of the finished groups; what is unfinished goes on in the next step.

    Nothing is lost to a shorter answer: a group that would grow too old is waited for.
    """

    def __init__(self, num_needed: int, max_asked: int, *, num_usable: int) -> None:
        """Start with nothing open.

        Args:
            num_usable: groups that this step and those after it, as far as groups may wait, can
                train on beside what those steps ask for themselves.
        """
        super().__init__(num_needed, max_asked)
        self._num_usable = num_usable
        self._due: set[int] = set()

    @property
    def is_full(self) -> bool:
        return self.num_with_signal >= self.num_needed and not self._due

    def hold(self, order: int) -> None:
        """Take over a group with a signal that is ready since a step before."""
        self.finished[order] = True
        self.num_with_signal += 1

    def carry(self, order: int, estimate: KeepRate, *, due: bool) -> None:
        """Take a group over from the step before; `due`: it cannot wait for another step."""
        self._open(order, estimate)
        if due:
            self._due.add(order)

    def wants(self, estimate: KeepRate) -> bool:
        """Whether a group more would find a batch before it is too old: engines are kept full."""
        return self._may_ask and not would_go_stale(
            self._num_usable, self.num_with_signal, self._chances()
        )

    def settle(self, order: int, is_mixed: bool) -> None:
        super().settle(order, is_mixed)
        self._due.discard(order)

    def chosen(self) -> list[int]:
        return self.with_signal[: self.num_needed]
