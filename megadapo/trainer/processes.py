"""The trainer's processes as the driver sees them: their names, their logs and their end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.cluster.process_log import trainer_log
from megadapo.cluster.watch.diagnostics import (
    HungProcesses,
    ProcessLocation,
    flight_pipe,
    save_stacks,
)
from megadapo.cluster.watch.heartbeat import HeartbeatWatch, all_alive
from megadapo.errors import InfraError, MegadapoError, ProcessHungError
from megadapo.trainer.worker import TrainerWorker, heartbeat_file

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

WITH_PROGRESS = ("update", "logprobs")
"""Calls that report each micro-batch as progress."""
HEARTBEAT_LIMIT = "trainer.progress_timeout_s"
LEAVE_TIMEOUT_S = 10.0
"""How long a rank may take to leave in good order before it is killed."""


class RankProcesses:
    """One process per rank; starts them at once, and ends all of them when one fails.

    Args:
        options: Ray's, for each rank's actor.
        environments: of each rank's process.
        log_folder: where each writes its log.
    """

    def __init__(
        self,
        options: Sequence[dict[str, Any]],
        environments: Sequence[dict[str, str]],
        log_folder: Path,
    ) -> None:
        import ray

        self.names = [f"trainer rank {rank}" for rank in range(len(options))]
        self.logs = [trainer_log(log_folder.resolve(), rank) for rank in range(len(options))]
        self._options = list(options)
        self._locations: list[ProcessLocation] = []
        self._pings: list[ObjectRef[Any]] = []
        self._heartbeats: HeartbeatWatch | None = None
        self._looking = threading.Lock()
        actor: Any = ray.remote(TrainerWorker)  # with options, Ray loses its type
        self.actors: list[ActorHandle[Any]] = [
            actor.options(**entry, runtime_env={"env_vars": environment}).remote(rank, log)
            for rank, (entry, environment, log) in enumerate(
                zip(options, environments, self.logs, strict=True)
            )
        ]
        """One handle per rank; none once they have ended."""

    def find(self, timeout_s: float, limit: str) -> None:
        """Wait until all processes run, and remember where.

        Raises:
            InfraError: one could not start in time.
        """
        calls = [actor.location.remote() for actor in self.actors]
        self._locations = self.gather(calls, "start", timeout_s, limit)

    def watch_over(self, limit_s: float) -> None:
        """Start to check for hung ranks; all must have started."""
        self._heartbeats = self.heartbeat_watch(limit_s)

    def heartbeat_watch(self, limit_s: float) -> HeartbeatWatch:
        """Return a check for hung ranks; each thread needs its own."""
        paths = [heartbeat_file(log) for log in self.logs]
        return HeartbeatWatch(
            self.names,
            paths,
            self.logs,
            with_progress=WITH_PROGRESS,
            limit_s=limit_s,
            limit=HEARTBEAT_LIMIT,
        )

    @property
    def progress(self) -> int:
        """Number of micro-batches that all ranks have reported."""
        return 0 if self._heartbeats is None else self._heartbeats.progress

    def look(self) -> None:
        """Check the ranks' heartbeats.

        Raises:
            ProcessHungError: a rank hangs.
        """
        if self._heartbeats is not None and self.actors and self._looking.acquire(blocking=False):
            try:
                self._heartbeats.check()
            finally:
                self._looking.release()

    def gather(
        self,
        calls: Sequence[ObjectRef[Any]],
        doing: str,
        timeout_s: float,
        limit: str,
        watch: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Results in order; the first failure ends all ranks, as the others wait for that one.

        Raises:
            MegadapoError: as `cluster.calls.gather` and `look`, and what `watch` raises.
        """

        def look() -> None:
            self.look()
            if watch is not None:
                watch()

        try:
            return gather(
                calls,
                names=self.names,
                doing=doing,
                timeout_s=timeout_s,
                limit=limit,
                logs=self.logs,
                watch=look,
            )
        except MegadapoError as error:
            self._kill(stacks=isinstance(error, ProcessHungError))
            raise

    def call_all(self, method: str, *args: Any) -> list[ObjectRef[Any]]:
        """Call a method of TrainerWorker on all ranks at once, without waiting.

        Raises:
            InfraError: they have ended.
        """
        if not self.actors:
            raise InfraError(f"the trainer cannot {method}: its ranks have ended")
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def check(self) -> None:
        """Look after the ranks while nobody waits for them.

        Raises:
            InfraError: one has died, or hangs.
        """
        import ray

        self.look()
        if not self._pings:
            self._pings = [actor.__ray_ready__.remote() for actor in self.actors]
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        for number, ping in enumerate(self._pings):
            if ping in answered:
                names, logs = [self.names[number]], [self.logs[number]]
                gather([ping], names=names, doing="rollout", timeout_s=0, logs=logs)
        if len(answered) == len(self._pings):
            self._pings = []

    def all_alive(self) -> bool:
        """Return whether all ranks send heartbeats."""
        return all_alive([heartbeat_file(log) for log in self.logs])

    def end(self) -> None:
        """Let all ranks leave, and kill those that do not; safe to call again."""
        import ray

        if not self.actors or not ray.is_initialized():
            return
        calls = self.call_all("leave")
        left, _ = ray.wait(calls, num_returns=len(calls), timeout=LEAVE_TIMEOUT_S)
        self._kill(stacks=len(left) < len(calls))

    def _kill(self, *, stacks: bool) -> None:
        """End all processes; `stacks`: once they have written down what they were doing."""
        import ray

        actors, self.actors = self.actors, []
        if stacks:
            save_stacks(self._hung_processes())
        for actor in actors:
            ray.kill(actor)

    def _hung_processes(self) -> list[HungProcesses]:
        by_node: dict[str, HungProcesses] = {}
        for rank, process in enumerate(self._locations):
            suspects = by_node.setdefault(process.node, HungProcesses(options=self._options[rank]))
            suspects.processes.append(process)
            suspects.pipes.append(flight_pipe(self.logs[rank].parent, rank))
        return list(by_node.values())
