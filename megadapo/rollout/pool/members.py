"""The engines of a pool as they join and leave during a run."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadapo.cluster.calls import Watch
from megadapo.cluster.places import Place
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.pool.pool import EnginePool

MemberState = Literal["starting", "waiting for weights", "serving", "leaving", "lost"]
_STATES: dict[str, MemberState] = {
    "starting": "starting",
    "stale_weights": "waiting for weights",
    "serving": "serving",
}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One engine, for the list of a run's engines."""

    number: int
    state: MemberState
    load: int
    """Number of responses in flight."""
    num_tokens: int
    """Number of tokens that its present process has generated."""
    log_file: Path
    has_failed: bool
    """Whether it has never served, and the limit of restarts is reached."""

    @property
    def stays(self) -> bool:
        return self.state != "leaving"


class ChangingPool(EnginePool):
    """A pool that engines join and leave; use its methods here within `unless_busy`."""

    def __init__(self, handles: Sequence[EngineHandle], watch: Watch | None = None) -> None:
        super().__init__(handles, watch)
        self._model_handle = handles[0]

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Prevent that an engine joins, leaves or gets older weights during a publication."""
        with self._publishing:
            yield

    @contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """Keep other threads and publications out; yield False during a publication."""
        with ExitStack() as held:
            for lock in (self._lock, self._publishing):
                if not lock.acquire(blocking=False):
                    yield False
                    return
                held.callback(lock.release)
            yield True

    def members(self) -> list[Member]:
        """Return all engines; any thread may call it."""
        return [
            Member(
                number=number,
                state="leaving"
                if engine.leave_at is not None
                else _STATES.get(engine.state, "lost"),
                load=engine.load,
                num_tokens=engine.num_tokens,
                log_file=engine.spec.log_file,
                has_failed=engine.is_new
                and engine.leave_at is None
                and engine.start_at > time.monotonic(),
            )
            for number, engine in self._handles.items()
        ]

    def updatable(self) -> list[int]:
        """Return the numbers of the engines that an update can reach and that need it."""
        left = [
            n
            for n, engine in self._handles.items()
            if engine.leave_at is not None and not engine.load
        ]
        return [number for number in super().updatable() if number not in left]

    def fail(self, index: int, cause: str) -> None:
        """Mark an engine as dead that cannot take the weights."""
        self.mark_dead(self._handles[index], cause, hangs=True)

    def note(self, line: str) -> None:
        """Add a line for the log, which `drain_warnings` returns."""
        self._warnings.append(line)

    def join(self, number: int, place: Place) -> None:
        """Start an engine; it serves once it has the weights that were published last."""
        engine = self._model_handle.start_another(number, place.gpus, place.options())
        engine.is_new = True
        # other threads iterate over the engines, so their table is never changed in place
        self._handles = {**self._handles, number: engine}

    def leave(self, number: int, *, within_s: float) -> None:
        """Give an engine no more groups, and end it when it has none.

        After `within_s` seconds its groups move to the other engines, which generate their tokens
        again: with the same bits, since they start as they were submitted.
        """
        self._handles[number].leave(within_s)

    def forget(self, number: int) -> None:
        """Remove an engine whose node is lost, so its processes cannot be told to end."""
        import ray

        engine = self._handles[number]
        ray.kill(engine.actor)
        engine.submits = {}
        engine.give_up()
        self._handles = {n: engine for n, engine in self._handles.items() if n != number}

    def finish_leaving(self, now: float) -> list[int]:
        """End the engines that have left, and return the numbers of ended ones.

        `now`: time of `time.monotonic`.
        """
        for engine in self._handles.values():
            if engine.leave_at is None or engine.state in ("ending", "ended", "gone"):
                continue
            if engine.state != "serving" or now >= engine.leave_at or not self._has_groups(engine):
                engine.end()
        ended = [
            number
            for number, engine in self._handles.items()
            if engine.leave_at is not None and engine.state in ("ended", "gone")
        ]
        self._handles = {n: engine for n, engine in self._handles.items() if n not in ended}
        return ended

    @abstractmethod
    def _has_groups(self, engine: EngineHandle) -> bool:
        """Return whether an engine has groups whose responses have not arrived."""
