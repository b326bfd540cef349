"""What one step's sampling came to: the batch, its counts, and what became of every group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megadapo.data.batch import Group
from megadapo.observe.config import SavedGroups
from megadapo.observe.saved_group import Fate
from megadapo.rollout.scoring import EngineShare
from megadapo.rollout.selection import SampledGroup, accuracy_histogram, choose_saved


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """The groups of one step and what was seen while they were sought.

    Everything but `groups`, `num_kept` and `num_from_reserve` is about the responses generated in
    this step, those of groups that were thrown away included; those of reserved groups were
    counted in the step that generated them.
    """

    groups: tuple[Group, ...]
    num_sampled: int
    """Groups generated: all right + all wrong + those with a signal."""
    num_all_correct: int
    num_all_wrong: int
    num_from_reserve: int
    """Groups of the batch that an earlier step had generated."""
    num_to_reserve: int
    """Surplus groups with a signal, kept for the next step."""
    num_dropped: int
    """Surplus groups with a signal for which the reserve had no room."""
    num_tokens: int | None
    """Response tokens generated; None where the groups were not generated but read."""
    reward_seconds: float | None
    """Time spent scoring; None where the groups were not scored but read."""
    accuracy: float
    """Share of correct responses."""
    reward_mean: float
    """Mean reward of the verifier, before any shaping."""
    response_length_mean: float
    """Mean length in tokens, the end-of-sequence token included."""
    response_length_p95: float
    truncated_fraction: float
    """Share of responses that were cut at the length limit."""
    response_lengths: tuple[int, ...]
    """Tokens of each response generated."""
    engines: tuple[EngineShare, ...]
    """What each engine did that was given groups."""
    saved: tuple[SampledGroup, ...]
    """The groups to be saved, those thrown away included."""

    @property
    def num_kept(self) -> int:
        """Groups in the batch."""
        return len(self.groups)


@dataclass
class Tally:
    """What one step has generated so far."""

    num_from_reserve: int
    generated: list[Group] = field(default_factory=list)
    to_reserve: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reward_seconds: float = 0.0
    engines: dict[int, EngineShare] = field(default_factory=lambda: defaultdict(EngineShare))

    def batch(self, kept: Sequence[Group], saved_groups: SavedGroups) -> SampledBatch:
        """The step's batch of the groups `kept`, of which those of the reserve come first."""
        samples = [sample for group in self.generated for sample in group.samples]
        lengths = np.array([len(sample.response_ids) for sample in samples])
        size = len(self.generated[0].samples)
        histogram = accuracy_histogram(self.generated)
        return SampledBatch(
            groups=tuple(kept),
            num_sampled=len(self.generated),
            num_all_correct=histogram[size],
            num_all_wrong=histogram[0],
            num_from_reserve=self.num_from_reserve,
            num_to_reserve=len(self.to_reserve),
            num_dropped=len(self.dropped),
            num_tokens=int(lengths.sum()),
            reward_seconds=self.reward_seconds,
            accuracy=float(np.mean([group.correct for group in self.generated])),
            reward_mean=float(np.mean([group.rewards for group in self.generated])),
            response_length_mean=float(lengths.mean()),
            response_length_p95=float(np.quantile(lengths, 0.95)),
            truncated_fraction=float(np.mean([sample.truncated for sample in samples])),
            response_lengths=tuple(lengths.tolist()),
            engines=tuple(share for _, share in sorted(self.engines.items())),
            saved=choose_saved(self._fates(kept), saved_groups),
        )

    def _fates(self, kept: Sequence[Group]) -> list[SampledGroup]:
        """Every group of the step with what became of it."""
        num_old = self.num_from_reserve
        taken = {group.order for group in (*kept, *self.to_reserve, *self.dropped)}
        no_signal = [group for group in self.generated if group.order not in taken]
        fates: tuple[tuple[Fate, bool, Sequence[Group]], ...] = (
            ("trained", True, kept[:num_old]),
            ("trained", False, kept[num_old:]),
            ("to_reserve", False, self.to_reserve),
            ("dropped", False, self.dropped),
            ("all_correct", False, [group for group in no_signal if all(group.correct)]),
            ("all_wrong", False, [group for group in no_signal if not any(group.correct)]),
        )
        return [
            SampledGroup(group=group, fate=fate, from_reserve=from_reserve)
            for fate, from_reserve, groups in fates
            for group in groups
        ]
