"""The rules of a batch written out for each mode: the definition of `Window`."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from megadapo.rollout.sampling.window import (
    ExpectedMixed,
    KeepRate,
    should_oversample,
    would_go_stale,
)


class Plan(ABC):
    """The groups that one step has requested, and those its batch still lacks."""

    def __init__(self, num_needed: int, max_asked: int) -> None:
        """Start a step whose batch lacks `num_needed` mixed groups."""
        self.num_needed = num_needed
        self.num_asked = 0
        self.open: dict[int, KeepRate] = {}
        """Prompt indices of open groups, each with its keep rate."""
        self.finished: dict[int, bool] = {}
        """Prompt indices of finished groups, and whether each group is mixed."""
        self.num_mixed = 0
        self._max_asked = max_asked
        self._num_at_once = 1
        self._num_open: Counter[KeepRate] = Counter()  # many prompts share a rate

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether the batch can be taken."""

    @abstractmethod
    def wants(self, rate: KeepRate) -> bool:
        """Return whether to request another group with this keep rate."""

    def cannot_make_batch(self) -> list[int]:
        """Return open prompt indices that can no longer get into the batch."""
        return []

    def chosen(self) -> list[int]:
        """Return the prompt indices of the batch, ascending; too few if the step fell short."""
        return self.mixed[: self.num_needed]

    def ask(self, prompt_index: int, rate: KeepRate) -> None:
        """Count a group as requested in this step."""
        self.num_asked += 1
        self._open(prompt_index, rate)
        self._num_at_once = max(self._num_at_once, len(self.open))

    def finish(self, prompt_index: int, is_mixed: bool) -> None:
        """Count a group as finished."""
        self._close(prompt_index)
        self.finished[prompt_index] = is_mixed
        self.num_mixed += is_mixed

    def drop(self, prompt_indices: Sequence[int]) -> None:
        """Count groups as cancelled."""
        for prompt_index in prompt_indices:
            self._close(prompt_index)

    @property
    def mixed(self) -> list[int]:
        """Prompt indices of finished mixed groups, ascending."""
        return sorted(index for index, is_mixed in self.finished.items() if is_mixed)

    @property
    def _may_ask(self) -> bool:
        return self.num_asked < self._max_asked

    def _expected(self) -> ExpectedMixed:
        expected = ExpectedMixed()
        for rate, num_groups in self._num_open.items():
            expected.add(rate, num_groups)
        return expected

    def _open(self, prompt_index: int, rate: KeepRate) -> None:
        self.open[prompt_index] = rate
        self._num_open[rate] += 1

    def _close(self, prompt_index: int) -> None:
        self._num_open[self.open.pop(prompt_index)] -= 1


class SyncPlan(Plan):
    """The first mixed groups by prompt index, waiting for every earlier group.

    A batch of the groups that finish first would be a batch of short responses.
    """

    def __init__(self, num_needed: int, max_asked: int) -> None:
        super().__init__(num_needed, max_asked)
        self._asked: list[int] = []  # ascending
        self._num_passed = 0  # length of the finished prefix of the requested groups
        self._chosen: list[int] = []

    @property
    def is_full(self) -> bool:
        return len(self._chosen) == self.num_needed

    def wants(self, rate: KeepRate) -> bool:
        """Return whether a missing group would cost more time than a surplus group."""
        num_missing = self.num_needed - self.num_mixed
        return self._may_ask and should_oversample(
            num_missing, self._expected(), rate, num_at_once=self._num_at_once
        )

    def cannot_make_batch(self) -> list[int]:
        """Return open prompt indices behind the last mixed group that the batch needs."""
        if self.num_mixed < self.num_needed:
            return []
        last = self.mixed[self.num_needed - 1]
        return [index for index in self.open if index > last]

    def chosen(self) -> list[int]:
        return self._chosen

    def ask(self, prompt_index: int, rate: KeepRate) -> None:
        super().ask(prompt_index, rate)
        self._asked.append(prompt_index)

    def finish(self, prompt_index: int, is_mixed: bool) -> None:
        super().finish(prompt_index, is_mixed)
        while not self.is_full and self._num_passed < len(self._asked):
            first = self._asked[self._num_passed]
            if first not in self.finished:
                break
            self._num_passed += 1
            if self.finished[first]:
                self._chosen.append(first)


class RoundsPlan(Plan):
    """Rounds of a fixed number of groups; each round waits for all of its groups."""

    def __init__(self, num_needed: int, max_asked: int, *, round_size: int) -> None:
        super().__init__(num_needed, max_asked)
        self._round_size = round_size
        self._num_left = 0  # groups of the current round that are not requested yet

    @property
    def is_full(self) -> bool:
        round_over = not self.open and not self._num_left
        return round_over and self.num_mixed >= self.num_needed

    def wants(self, rate: KeepRate) -> bool:
        """Return whether the current round lacks requests; start the next if it is over."""
        if not self.open and not self._num_left and self._may_ask:
            self._num_left = min(self._round_size, self._max_asked - self.num_asked)
        return self._num_left > 0

    def ask(self, prompt_index: int, rate: KeepRate) -> None:
        super().ask(prompt_index, rate)
        self._num_left -= 1


class PartialPlan(Plan):
    """The first finished groups by prompt index; unfinished groups continue in the next step.

    A group that would become too old is waited for, so long responses are not lost.
    """

    def __init__(self, num_needed: int, max_asked: int, *, num_usable: int) -> None:
        """`num_usable`: as in `would_go_stale`."""
        super().__init__(num_needed, max_asked)
        self._num_usable = num_usable
        self._due: set[int] = set()

    @property
    def is_full(self) -> bool:
        return self.num_mixed >= self.num_needed and not self._due

    def add_reserved(self, prompt_index: int) -> None:
        """Add a mixed group that finished in an earlier step."""
        self.finished[prompt_index] = True
        self.num_mixed += 1

    def resume(self, prompt_index: int, rate: KeepRate, *, due: bool) -> None:
        """Add an unfinished group of an earlier step; if it is `due`, the batch waits for it."""
        self._open(prompt_index, rate)
        if due:
            self._due.add(prompt_index)

    def wants(self, rate: KeepRate) -> bool:
        """Return whether another group would find a batch before it is too old."""
        return self._may_ask and not would_go_stale(
            self._num_usable, self.num_mixed, self._expected()
        )

    def finish(self, prompt_index: int, is_mixed: bool) -> None:
        super().finish(prompt_index, is_mixed)
        self._due.discard(prompt_index)
