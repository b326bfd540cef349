"""An evaluation in the slots that training leaves idle."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.sampling.evaluation import EvaluationUnderWay
from megadapo.rollout.sampling.scoring import SupportsGenerate
from megadapo.rollout.types import GroupRequest, GroupResponse, StopReport


class SupportsSharing(SupportsGenerate, Protocol):
    """What it takes of engines that an evaluation can share them; `Engines` is one."""

    def capacity_without(self, keys: Collection[int]) -> int:
        """As `capacity`, if the groups with these keys, which are in flight, were not."""
        ...


class InterleavedEngines:
    """The engines as the sampler sees them: as if the evaluation that shares them were not there.

    Groups of training come first: questions of the evaluation are asked only where no group of
    training takes a slot, and wait behind every such group in an engine. So they change when the
    groups of a step come back, and nothing else.
    """

    def __init__(self, engines: SupportsSharing) -> None:
        self.evaluation: EvaluationUnderWay | None = None
        """What shares the engines; None: nothing does."""
        self._engines = engines
        self._in_flight: set[int] = set()

    @property
    def policy_version(self) -> int:
        return self._engines.policy_version

    @property
    def capacity(self) -> int:
        """As if the evaluation's slots were empty."""
        return self._engines.capacity_without(
            () if self.evaluation is None else self.evaluation.generating
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        self._in_flight.update(group.key for group in groups)
        self._engines.submit(groups)

    def finished(self, timeout_s: float | None = None) -> list[GroupResponse]:
        """Also returns, with nothing, where only answers of the evaluation have come back."""
        if self.evaluation is None:
            groups = self._engines.finished(timeout_s)
        else:
            self.evaluation.ask(self._engines.capacity)
            groups = self.evaluation.take(self._engines.finished(timeout_s))
        self._in_flight.difference_update(group.key for group in groups)
        return groups

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        chosen = set(self._in_flight if keys is None else self._in_flight & set(keys))
        self._in_flight -= chosen
        report = self._engines.stop(chosen, keep=keep)
        if keys is None and self.evaluation is not None:
            # until the next weights, nobody else wants the engines
            self.evaluation.ask()
        return report

    def activity(self) -> list[EngineActivity]:
        """What each engine did, the evaluation's share included."""
        return self._engines.activity()
