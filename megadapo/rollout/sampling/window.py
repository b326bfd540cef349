"""The window: requested groups that are not trained, and which of them the next batch takes.

It sees only prompt indices; it uses no engines, no texts and no clock. Its batch does not depend on
which group finishes first, unless groups may wait for a later step.

When to request another group follows from the expected number of mixed groups among open ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megadapo.rollout.config import SamplingConfig

KEEP_RATE_DECAY = 0.5
"""Factor on the counts of earlier steps in a keep rate when a newer step is added."""
LATE_REQUEST_COST = 0.125
"""Extra time of a step if a missing group is requested late, as a share of a group's time.

A shortage is noticed half-way on average, so 0.5 is the upper bound. It is lower because the batch
often waits for a longer group anyway. `megadapo simulate` was used to choose it: with 0.25 one
regime wastes 7 % of the kept tokens, with 0.125 none wastes more than 5 %."""
MARGIN = 2.0
"""Standard deviations by which the number of mixed groups may exceed its expectation."""
SAFE_MARGIN = 6.0
"""The same where an excess would drop groups."""
SAFE_GROWTH = 1.25
"""Factor by which keep rates may exceed their estimates there, because the policy learns."""


@dataclass(eq=False)
class KeepRate:
    """The share of mixed groups, estimated from earlier steps and the current one."""

    requested: float = 0.0
    mixed: float = 0.0
    requested_now: Annotated[int, Field(exclude=True)] = 0
    mixed_now: Annotated[int, Field(exclude=True)] = 0

    @property
    def value(self) -> float:
        """Mean of a Beta posterior with a uniform prior, in (0, 1)."""
        return (self.mixed + self.mixed_now + 1.0) / (self._total + 2.0)

    @property
    def variance(self) -> float:
        """Variance of the posterior."""
        return self.value * (1.0 - self.value) / (self._total + 3.0)

    def add(self, is_mixed: bool) -> None:
        """Count a group of the current step until `end_step` replaces these counts."""
        self.requested_now += 1
        self.mixed_now += is_mixed

    def end_step(self, num_requested: int, num_mixed: int) -> None:
        """Add the final counts of a step, which do not depend on the order of finishing."""
        self.requested_now = self.mixed_now = 0
        if num_requested:
            self.requested = KEEP_RATE_DECAY * self.requested + num_requested
            self.mixed = KEEP_RATE_DECAY * self.mixed + num_mixed

    @property
    def _total(self) -> float:
        return self.requested + self.requested_now


@dataclass
class ExpectedMixed:
    """Mean and variance of the number of mixed groups among the open ones."""

    mean: float = 0.0
    variance: float = 0.0
    num_groups: int = 0

    @classmethod
    def of(cls, num_groups: Mapping[KeepRate, int]) -> ExpectedMixed:
        """Return the expectation for these numbers of groups with each keep rate."""
        expected = cls()
        for rate, number in num_groups.items():
            expected.add(rate, number)
        return expected

    @property
    def most(self) -> float:
        """Number of mixed groups that is practically never exceeded."""
        spread = math.sqrt(self.variance)
        return min(self.num_groups, SAFE_GROWTH * self.mean + SAFE_MARGIN * spread)

    def add(self, rate: KeepRate, num_groups: int) -> None:
        """Add groups with one keep rate; errors of different rates are independent."""
        p = rate.value
        self.num_groups += num_groups
        self.mean += num_groups * p
        self.variance += num_groups * p * (1.0 - p) + num_groups**2 * rate.variance


def should_oversample(
    num_missing: int, expected: ExpectedMixed, rate: KeepRate, *, num_at_once: int
) -> bool:
    """Return whether to request another group now, before it is known to be missing.

    Let p be the probability that the open groups are one short and this group is the missing one.
    Without the request the step then takes LATE_REQUEST_COST of a group's time longer. With it, the
    other groups always wait for one group's share of the engines' throughput. By Little's law a
    group's time is num_at_once such shares, so request it if p LATE_REQUEST_COST num_at_once > 1.

    Args:
        num_missing: mixed groups that the batch lacks.
        expected: mixed groups among the open ones.
        rate: keep rate of the next prompt.
        num_at_once: largest number of groups that were open at once in this step.
    """
    if expected.mean < num_missing:
        return True
    if num_missing <= 0:
        return False
    spread = math.sqrt(expected.variance)
    if spread == 0.0:
        return False
    gap = (num_missing - 0.5 - expected.mean) / spread
    density = math.exp(-0.5 * gap * gap) / math.sqrt(2.0 * math.pi) / spread
    return density * rate.value * LATE_REQUEST_COST * num_at_once > 1.0


def would_go_stale(num_usable: int, num_ready: int, expected: ExpectedMixed) -> bool:
    """Return whether another group could finish after the last batch that may train on it.

    Args:
        num_usable: groups that this and later steps can train on before they are too old, beside
            the groups those steps request themselves.
        num_ready: mixed groups that have finished.
        expected: mixed groups among the open ones.
    """
    return num_ready + expected.mean + MARGIN * math.sqrt(expected.variance) >= num_usable


def num_places(config: SamplingConfig) -> int:
    """Return the number of groups in the batches that may train on tokens of one version."""
    return (config.max_staleness + 1) * config.prompts_per_step


def adapted_lead(config: SamplingConfig, most_untrained: int, num_left: int) -> int:
    """Return `most_untrained` of the next window, after a batch that left `num_left` mixed groups.

    Less is requested in advance if batches wait for the trainer, and more if it waits for them.
    Otherwise fast engines would make all tokens as old as max_staleness allows.
    """
    size = config.prompts_per_step
    if num_left > size // 2:
        most_untrained -= num_left // 2
    elif num_left <= size // 8:
        most_untrained += size // 2
    return bounded_lead(config, most_untrained)


def bounded_lead(config: SamplingConfig, most_untrained: int) -> int:
    """Return `most_untrained` between the groups of one batch and the places of all batches."""
    return min(num_places(config), max(config.prompts_per_step, most_untrained))


class Window:
    """The requested groups that are not trained yet, and the batch that the next step takes.

    Without staleness, the batch has the first mixed groups by prompt index, and every earlier group
    is waited for: the groups that finish first would be short ones. With staleness, it has the
    first finished ones. The others continue, and a group is waited for if no later batch could
    train on it. In rounds, every requested group is waited for.
    """

    def __init__(
        self,
        num_needed: int,
        max_asked: int,
        *,
        step: int = 0,
        max_staleness: int = 0,
        most_untrained: int | None = None,
        round_size: int | None = None,
    ) -> None:
        """Start a step whose batch lacks `num_needed` mixed groups.

        Args:
            max_asked: largest number of groups to request for the step.
            step: the step that trains on the batch.
            max_staleness: number of later steps that may train on a group of this one.
            most_untrained: largest number of groups that are open or wait for a batch. If given,
                no more groups are requested than the next batches can use: each mixed one finds
                a batch (`ExpectedMixed.most`).
            round_size: number of groups that are requested and awaited as a whole.
        """
        self.num_needed = num_needed
        self.num_asked = 0
        self.open: dict[int, KeepRate] = {}
        """Prompt indices of open groups, each with its keep rate."""
        self.mixed: list[int] = []
        """Prompt indices of finished mixed groups, ascending."""
        self._max_asked, self._step = max_asked, step
        self._max_staleness, self._most_untrained = max_staleness, most_untrained
        self._round_size, self._num_left_of_round = round_size, 0
        self._last_steps: dict[int, int] = {}
        """The last step that may train on each group, with staleness."""
        self._num_at_once = 1
        self._num_open: Counter[KeepRate] = Counter()  # many prompts share a rate

    @classmethod
    def for_step(cls, config: SamplingConfig, step: int, most_untrained: int) -> Window:
        """Return the window of a step, without groups; only async mode uses `most_untrained`."""
        round_size = config.round_size if config.mode == "rounds" else None
        if config.selection == "all" and not config.carries and round_size is None:
            # every group is kept, so no surplus is needed
            round_size = config.prompts_per_step
        return cls(
            config.prompts_per_step,
            config.max_asked_per_step,
            step=step,
            max_staleness=config.max_staleness if config.carries else 0,
            most_untrained=most_untrained if config.mode == "async" else None,
            round_size=round_size,
        )

    @property
    def is_full(self) -> bool:
        """Whether the batch can be taken."""
        return len(self.mixed) >= self.num_needed and not self.num_awaited

    @property
    def num_awaited(self) -> int:
        """Number of open groups that the batch waits for, even if it has enough mixed groups."""
        if self._round_size is not None:
            return len(self.open) + self._num_left_of_round
        if not self._max_staleness:
            return sum(index < self._last for index in self.open)
        last_steps = Counter(self._last_steps[index] for index in self.open)
        return sum(number for step, number in last_steps.items() if self._must_wait(step))

    @property
    def num_overdue(self) -> int:
        """Number of open groups that a batch with enough mixed groups waits for."""
        return self.num_awaited if len(self.mixed) >= self.num_needed else 0

    def wants(self, rate: KeepRate, version: int) -> bool:
        """Return whether to request another group with this keep rate now.

        `version`: policy version of the engines' weights.
        """
        if self.num_asked >= self._max_asked:
            return False
        if self._round_size is not None:
            if not self.open and not self._num_left_of_round:
                num_left = self._max_asked - self.num_asked
                self._num_left_of_round = min(self._round_size, num_left)
            return self._num_left_of_round > 0
        num_mixed, expected = len(self.mixed), ExpectedMixed.of(self._num_open)
        if not self._max_staleness:
            num_missing = self.num_needed - num_mixed
            return should_oversample(num_missing, expected, rate, num_at_once=self._num_at_once)
        if self._most_untrained is not None:
            if num_mixed + len(self.open) >= self._most_untrained:
                return False
            if num_mixed + expected.most + 1 > self._num_places(self._last_step(version)):
                return False
        num_usable = self.num_needed + self._max_staleness * self.num_needed // 2
        return not would_go_stale(num_usable, num_mixed, expected)

    def is_too_old(self, version: float) -> bool:
        """Return whether neither this step nor a later one may train on tokens of this version."""
        return bool(self._max_staleness) and self._last_step(version) < self._step

    def cannot_make_batch(self) -> list[int]:
        """Return open prompt indices after the last mixed group that the batch needs."""
        if self._max_staleness or self._round_size is not None:
            return []
        return [index for index in self.open if index > self._last]

    def chosen(self) -> list[int]:
        """Return the prompt indices of the batch, ascending; too few if the step fell short."""
        return self.mixed[: self.num_needed]

    def ask(self, prompt_index: int, rate: KeepRate, version: int) -> None:
        """Count a group as requested in this step."""
        self.num_asked += 1
        self._num_left_of_round -= self._round_size is not None
        self.carry(prompt_index, rate, version)
        self._num_at_once = max(self._num_at_once, len(self.open))

    def carry(self, prompt_index: int, rate: KeepRate | None, version: int) -> None:
        """Add a group that was requested with the weights of this version.

        `rate` is None if it has finished as a mixed group.
        """
        if self._max_staleness:
            self._last_steps[prompt_index] = self._last_step(version)
        if rate is None:
            insort(self.mixed, prompt_index)
        else:
            self.open[prompt_index] = rate
            self._num_open[rate] += 1

    def finish(self, prompt_index: int, is_mixed: bool) -> None:
        """Count a group as finished."""
        self.drop([prompt_index])
        if is_mixed:
            insort(self.mixed, prompt_index)

    def drop(self, prompt_indices: Sequence[int]) -> None:
        """Count groups as cancelled."""
        for prompt_index in prompt_indices:
            self._num_open[self.open.pop(prompt_index)] -= 1

    @property
    def _last(self) -> float:
        """Prompt index of the last mixed group that the batch needs."""
        enough = len(self.mixed) >= self.num_needed
        return self.mixed[self.num_needed - 1] if enough else math.inf

    def _last_step(self, version: float) -> int:
        """Return the last step that may train on tokens of this version."""
        return int(version) + self._max_staleness + 1

    def _num_places(self, last_step: int) -> int:
        """Return the number of groups in the batches of this step to `last_step`."""
        return (last_step - self._step + 1) * self.num_needed

    def _must_wait(self, last_step: int) -> bool:
        """Return whether open groups with this last step could miss all batches up to it.

        The batches after this one have a limited number of places for them. If there may be more
        such groups, this batch must take some of them instead of younger ones. If there are more of
        them all the same, those with the highest prompt index become too old.
        """
        if last_step <= self._step:
            return True
        if self._most_untrained is None:
            return False
        left = self.mixed[self.num_needed :]
        num_left = sum(self._last_steps[index] <= last_step for index in left)
        rates = Counter(
            rate for index, rate in self.open.items() if self._last_steps[index] <= last_step
        )
        num_later = self._num_places(last_step) - self.num_needed
        return num_left + ExpectedMixed.of(rates).most > num_later
