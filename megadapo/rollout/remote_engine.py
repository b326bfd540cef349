"""One engine as the driver sees it: its actor, how much it has to do and whether it gets on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from megadapo.rollout.engine import EngineSpec, RolloutEngine
from megadapo.rollout.requests import EngineReport, GroupRequest, StopReport

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

HEARTBEAT_S = 5.0
"""Longest time between two reports of an engine."""
REPORTS_PER_FILL = 8
"""Reports while so many responses end as the engine generates at once: the driver must learn of
free slots in time, but not of every response."""


class RemoteEngine:
    """The slot of one engine.

    Args:
        options: Ray's, for the engine's actor.
        kind: the class of the actor.
    """

    def __init__(
        self,
        spec: EngineSpec,
        options: dict[str, Any],
        kind: type[RolloutEngine] = RolloutEngine,
    ) -> None:
        self.spec = spec
        self.quiet_s = 0.0
        """For how long it was seen to have work and give no token."""
        self.actor = _start_actor(spec, options, kind)
        self.starting: ObjectRef[None] = self.actor.start.remote()
        self._num_asked: int = 0
        self._num_ended: int = 0
        self._num_tokens: int = 0

    @property
    def load(self) -> int:
        """Responses in flight."""
        return self._num_asked - self._num_ended

    def submit(self, groups: Sequence[GroupRequest]) -> ObjectRef[None]:
        """Let it generate groups that were `assigned` to it."""
        return self.actor.submit.remote(list(groups))

    def assigned(self, num_responses: int) -> None:
        """Count responses that it is about to be asked for."""
        if not self.load:
            self.quiet_s = 0.0
        self._num_asked += num_responses

    def report(self) -> ObjectRef[EngineReport]:
        """Ask for the next report; there is one call at a time."""
        heartbeat_s = min(HEARTBEAT_S, self.spec.config.engine_progress_timeout_s / 3)
        num_for_report = max(1, self.spec.config.max_num_seqs // REPORTS_PER_FILL)
        return self.actor.collect.remote(heartbeat_s, num_for_report)

    def take(self, report: EngineReport) -> None:
        """Learn from a report."""
        # the answer to a stop may overtake a report that was sent before
        self._num_ended = max(self._num_ended, report.num_ended)
        if report.num_tokens != self._num_tokens:
            self._num_tokens = report.num_tokens
            self.quiet_s = 0.0

    def waited(self, seconds: float) -> None:
        """The driver has waited for reports for so long."""
        self.quiet_s = self.quiet_s + seconds if self.load else 0.0

    def stop(
        self, keys: Collection[int], *, keep: bool
    ) -> ObjectRef[tuple[StopReport, EngineReport]]:
        """End groups."""
        return self.actor.stop.remote(set(keys), keep)


def _start_actor(
    spec: EngineSpec, options: dict[str, Any], kind: type[RolloutEngine]
) -> ActorHandle[Any]:
    import ray

    actor: Any = ray.remote(kind)  # with options, Ray loses its type
    handle: ActorHandle[Any] = actor.options(max_restarts=0, max_task_retries=0, **options).remote(
        spec
    )
    return handle
