"""One engine as the driver sees it: its process, what it has to do and whether it gets on.

A slot outlives the processes that fill it one after the other. At any time one call of its actor is
awaited: the start, the next report or, of a process that is to go, the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from megadapo.cluster.reaper import kill_marked
from megadapo.rollout.engine import RolloutEngine
from megadapo.rollout.engine_spec import EngineSpec
from megadapo.rollout.requests import EngineReport, GroupRequest

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

State = Literal["starting", "blank", "serving", "ending", "gone"]
"""Blank: it answers, but has not got the present weights."""

Place = tuple[int, int]
"""An engine's number, and which of the processes that have filled its slot."""

HEARTBEAT_S = 5.0
"""Longest time between two reports of an engine."""
REPORTS_PER_FILL = 8
"""Reports while so many responses end as the engine generates at once: the driver must learn of
free slots in time, but not of every response."""


class RemoteEngine:
    """The slot of one engine; starts it at once.

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
        self.num_starts = 0
        self.asleep = False
        self._options, self._kind = options, kind
        self.start()

    def start(self) -> None:
        """Start a process in this slot."""
        self.state: State = "starting"
        self.num_starts += 1
        self.quiet_s = 0.0
        """For how long it was seen to have work and give no token, or to start or end."""
        self.asleep = False
        self._num_asked: int = 0
        self._num_ended: int = 0
        self._num_tokens: int = 0
        self.submits: dict[ObjectRef[None], list[GroupRequest]] = {}
        """Calls to submit that have not been answered."""
        self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self.actor: ActorHandle[Any] = self._start_actor()
        self._pid: ObjectRef[int] = self.actor.pid.remote()
        self.awaited: ObjectRef[Any] | None = self.actor.start.remote()
        """Start, report or end."""

    def started(self) -> None:
        """The process has answered its first request."""
        self.state = "serving" if self.spec.weights_from == "folder" else "blank"
        self.quiet_s = 0.0
        self._ask_report()

    def end(self) -> None:
        """Begin to end the process and all that it started, whatever state they are in."""
        import ray

        self.state = "ending"
        self.quiet_s = 0.0
        self.submits = {}
        ray.kill(self.actor)
        known, _ = ray.wait([self._pid], timeout=0)
        pid = _result(known[0]) if known else None
        # no share of a GPU, which a process that does not react would still hold
        options = {**self._options, "num_gpus": 0}
        end: Any = ray.remote(_end_processes)
        self.awaited = end.options(**options).remote(pid, self._mark)

    @property
    def load(self) -> int:
        """Responses in flight."""
        return self._num_asked - self._num_ended

    @property
    def place(self) -> Place:
        """Names the process."""
        return self.spec.index, self.num_starts

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"rollout engine {self.spec.index}"

    @property
    def is_stuck(self) -> bool:
        """Whether it has been quiet for too long."""
        config = self.spec.config
        if self.state in ("starting", "ending"):
            return self.quiet_s > config.start_timeout_s
        return self.quiet_s > config.engine_progress_timeout_s

    @property
    def pending(self) -> list[ObjectRef[Any]]:
        """Calls whose answers are to be taken."""
        return [*self.submits, *([] if self.awaited is None else [self.awaited])]

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Let it generate groups that it was `assigned`."""
        self.submits[self.actor.submit.remote(list(groups))] = list(groups)

    def assigned(self, num_responses: int) -> None:
        """Count responses that it is about to be asked for."""
        if not self.load:
            self.quiet_s = 0.0
        self._num_asked += num_responses

    def take(self, report: EngineReport, *, ask_again: bool) -> None:
        """Learn from a report, and ask for the next one if it was the one that is awaited."""
        # the answer to a stop may overtake a report that was sent before
        self._num_ended = max(self._num_ended, report.num_ended)
        if report.num_tokens != self._num_tokens:
            self._num_tokens = report.num_tokens
            self.quiet_s = 0.0
        if ask_again:
            self._ask_report()

    def waited(self, seconds: float) -> None:
        """The driver has waited for so long."""
        is_due = self.load or self.state in ("starting", "ending")
        self.quiet_s = self.quiet_s + seconds if is_due else 0.0

    def _ask_report(self) -> None:
        heartbeat_s = min(HEARTBEAT_S, self.spec.config.engine_progress_timeout_s / 3)
        num_for_report = max(1, self.spec.config.max_num_seqs // REPORTS_PER_FILL)
        self.awaited = self.actor.collect.remote(heartbeat_s, num_for_report)

    def _start_actor(self) -> ActorHandle[Any]:
        import ray

        actor: Any = ray.remote(self._kind)  # with options, Ray loses its type
        handle: ActorHandle[Any] = actor.options(
            max_restarts=0, max_task_retries=0, **self._options
        ).remote(self.spec, self._mark)
        return handle


def _result(ref: ObjectRef[int]) -> int | None:
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(ref)
    except RayActorError:
        return None  # it died before it could tell


def _end_processes(pid: int | None, mark: str) -> None:
    """Kill an actor's process, which may be stopped and deaf to Ray, and all that it started."""
    if pid is not None:
        # gone meanwhile; or the number is already another process's, which Ray did not title
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                title = file.read()
            if title.startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)
    kill_marked(mark)
