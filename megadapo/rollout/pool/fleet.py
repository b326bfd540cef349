"""The engines that a run has: who serves, who is lost, and how a lost one comes back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import result_of, timeout_error
from megadapo.errors import InfraError, ProcessDiedError
from megadapo.rollout.engine.failure import describe_failure
from megadapo.rollout.pool.remote_engine import EngineIncarnation, RemoteEngine
from megadapo.rollout.types import EngineReport, GroupRequest

if TYPE_CHECKING:
    from ray import ObjectRef


WATCH_S = 2.0
"""Longest time between two looks at whether the engines live and get on."""
AHEAD = 0.25
"""Responses that wait for a slot, as a share of the slots: while the driver is busy with what came
before, an engine takes the next ones from there."""


class Fleet:
    """All slots. A lost engine is ended, started again and given the present weights."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.slots = {engine.spec.index: engine for engine in engines}
        """By number."""
        self.config = engines[0].spec.config
        self.notes: list[str] = []
        """One line for every engine that was lost."""
        self.refused: list[GroupRequest] = []
        """Groups that no engine generates, since one of them is not a request that can be met."""
        self.num_lost = 0
        self.republish: Callable[[int], object] | None = None
        """Gives one engine the weights that the others have; None where they need none."""
        self._num_restarts, self._max_restarts = 0, self.config.max_engine_restarts
        self._weights_stay = False
        self._looked = time.monotonic()
        self._bringing_up = threading.RLock()

    @property
    def engines(self) -> list[RemoteEngine]:
        """All slots, in order of their numbers."""
        return list(self.slots.values())

    @property
    def serving(self) -> list[RemoteEngine]:
        """Engines that can generate."""
        return [engine for engine in self.engines if engine.state == "serving"]

    @property
    def present(self) -> list[RemoteEngine]:
        """Engines that answer calls."""
        return [engine for engine in self.engines if engine.state in ("serving", "blank")]

    def capacity(self, left_out: Mapping[EngineIncarnation, int]) -> int:
        """Responses that serving engines may be asked for so that they stay ahead.

        Args:
            left_out: responses that are in flight and do not count, by process.
        """
        wanted = math.ceil(self.config.max_num_seqs * (1 + AHEAD))
        loads = [max(0, one.load - left_out.get(one.place, 0)) for one in self.serving]
        return sum(max(0, wanted - load) for load in loads)

    def call(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, ObjectRef[Any]]:
        """Call a method of the engines with these numbers, without waiting."""
        return {
            index: getattr(self.slots[index].actor, method).remote(*values)
            for index, values in arguments.items()
        }

    def wait(self, timeout_s: float) -> list[EngineReport]:
        """Take what the engines report within so many seconds.

        Raises:
            InfraError: an engine refused a request, or the last one is lost.
        """
        import ray

        started = time.monotonic()
        slots = {ref: engine for engine in self.engines for ref in engine.pending}
        ready, _ = ray.wait(list(slots), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(slots), num_returns=len(slots), timeout=0)
        # looks come every few seconds, also while nobody waits; what the driver was busy for longer
        # is not the engines' silence
        now = time.monotonic()
        seconds = now - started + min(started - self._looked, WATCH_S)
        self._looked = now
        for engine in self.engines:
            engine.waited(seconds)
        # a refusal is an error to raise: nothing that was reported may be lost over it
        ready.sort(key=lambda ref: ref not in slots[ref].submits)
        reports = [report for ref in ready if (report := self._take(slots[ref], ref)) is not None]
        for engine in self.engines:
            if engine.state != "gone" and engine.is_stuck:
                self.lose(engine, _describe_silence(engine), hangs=engine.state != "ending")
        self._bring_up()
        return reports

    def gather(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        forgive: bool = True,
    ) -> dict[int, Any]:
        """Results of one call per engine, without those of engines that were lost over it.

        An engine that dies or does not answer in time is lost; `forgive`: so is one that answers
        with an error, which is raised otherwise.

        Raises:
            InfraError: the last engine is lost.
        """
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        for index, ref in refs.items():
            engine = self.slots[index]
            cause = str(timeout_error([engine.name], doing, timeout_s, limit))
            if (died := self._wait_for(engine, ref, deadline)) is not None:
                self.lose(engine, died or cause, hangs=not died)
                continue
            try:
                results[index] = self._read(engine, ref, doing)
            except InfraError as error:
                if not forgive and not isinstance(error, ProcessDiedError):
                    raise
                self.lose(engine, str(error))
        return results

    def _wait_for(self, engine: RemoteEngine, ref: ObjectRef[Any], deadline: float) -> str | None:
        """Wait for a call; what ended the engine if it died over it, nothing if it is late.

        vLLM does not answer a call over which its processes die; the next report is an error then.
        """
        import ray

        while True:
            left = max(0.0, deadline - time.monotonic())
            if ray.wait([ref], timeout=min(left, WATCH_S))[0]:
                return None
            if engine.awaited is not None and ray.wait([engine.awaited], timeout=0)[0]:
                try:
                    self._read(engine, engine.awaited, "generate")  # `wait` takes it later
                except ProcessDiedError as error:
                    return str(error)
            if not left:
                return ""

    def lose(self, engine: RemoteEngine, cause: str, *, hangs: bool = False) -> None:
        """End an engine, and start it again if it may be.

        `hangs`: its processes are there, and their log gets their stacks.

        Raises:
            InfraError: it was the last.
        """
        self.num_lost += 1
        comes_back = self._num_restarts < self._max_restarts
        self._num_restarts += comes_back
        engine.end(hangs=hangs)
        if hangs:
            cause = f"{cause}; stacks: {engine.spec.log_file}"
        if not comes_back:
            engine.state = "gone"
            engine.awaited = None
        allowed = f"{self._num_restarts} of {self._max_restarts} (rollout.max_engine_restarts)"
        what = f"it is started again, restart {allowed}" if comes_back else "it stays away"
        self.notes.append(f"{cause}; {what}")
        if all(one.state == "gone" for one in self.engines):
            raise InfraError(f"{cause}; no engine is left after restart {allowed}")

    def on_update_start(self) -> None:
        """From now on the trainer's weights are not those that the engines have."""
        with self._bringing_up:
            self._weights_stay = False

    def weights_are_published(self) -> None:
        """The trainer's weights are those that serving engines have, until it moves on."""
        self._weights_stay = True

    def _take(self, engine: RemoteEngine, ref: ObjectRef[Any]) -> EngineReport | None:
        """Read a call that has ended; its report if it is one."""
        if ref not in engine.pending:
            return None  # of a process that was lost since
        groups = engine.submits.pop(ref, None)
        try:
            answer = self._read(engine, ref, "generate")
        except InfraError as error:
            if groups is not None and not isinstance(error, ProcessDiedError):
                engine.assigned(-sum(group.num_at_once for group in groups))
                self.refused += groups
                raise
            self.lose(engine, str(error))
            return None
        if groups is not None:
            return None
        if engine.state == "ending":
            engine.start()
        elif engine.state == "starting":
            engine.started()
        else:
            report: EngineReport = answer
            engine.take(report, ask_again=True)
            return report
        return None

    def _bring_up(self) -> None:
        """Give engines that have started the weights that the others have, if there are any."""
        blank = [engine for engine in self.engines if engine.state == "blank"]
        if not blank or self.republish is None:
            return
        with self._bringing_up:
            for engine in blank:
                if self._weights_stay:
                    self.republish(engine.spec.index)

    def _read(self, engine: RemoteEngine, ref: ObjectRef[Any], doing: str) -> Any:
        return result_of(
            ref, name=engine.name, doing=doing, describe_death=lambda: describe_death(engine)
        )


def describe_death(engine: RemoteEngine) -> str:
    """Say that an engine's process is gone, with the cause from its log."""
    return describe_failure(f"{engine.name} died", "", engine.spec.log_file)


def _describe_silence(engine: RemoteEngine) -> str:
    config = engine.spec.config
    if engine.state in ("starting", "ending"):
        what = "start" if engine.state == "starting" else "end"
        return str(
            timeout_error([engine.name], what, config.start_timeout_s, "rollout.start_timeout_s")
        )
    if not engine.load:
        return (
            f"{engine.name} sent no heartbeat for {config.engine_progress_timeout_s:g} s "
            "(rollout.engine_progress_timeout_s)"
        )
    return (
        f"{engine.name} has work and gave no token for {config.engine_progress_timeout_s:g} s "
        "(rollout.engine_progress_timeout_s)"
    )
