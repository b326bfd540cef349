"""The trainer's ranks and the engines of a weight update, and calls to them with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megadapo.cluster.calls import gather
from megadapo.errors import InfraError, MegadapoError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.weights.sync.transports.interface import Transport

DEADLINE = "weights.deadline_s"
PUBLISHED_GROUP = "published"
"""Ray's concurrency group of the calls that send the weights published last."""
MEETING_S = 600.0
"""Seconds that all ranks and engines have to meet, if `weights.deadline_s` is shorter: the first
meeting of hundreds of processes is slower than any bucket."""


class UpdatableEngines(Protocol):
    """The interface of the rollout engines that an update uses, as `rollout.pool.Engines` has."""

    @property
    def policy_version(self) -> int:
        """Policy version of the weights published last."""

    def publishing(self) -> AbstractContextManager[None]:
        """Return a block in which no other update starts, with engines that start or restart."""

    def updatable(self) -> list[int]:
        """Return the numbers of the engines that an update can reach now."""

    def incarnation(self, index: int) -> Hashable:
        """Return a value that changes when another process replaces an engine's."""

    def gpus(self, index: int) -> tuple[str, ...]:
        """Return the GPU names of an engine on its node; empty on a CPU."""

    def call(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, ObjectRef[Any]]:
        """Call a method of the engines with these numbers, without waiting.

        Engines that cannot answer are left out.
        """

    def gather(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        forgive: bool = True,
    ) -> dict[int, Any]:
        """Return the results of calls, without those of engines that were lost during them.

        `forgive`: an engine that answers with an error is lost as well; else the error is raised.
        """

    def finish_weight_update(
        self,
        indices: Sequence[int],
        policy_version: int,
        *,
        timeout_s: float,
        republish: Callable[[int], object],
        any_time: bool = False,
    ) -> None:
        """End an update.

        `republish` gives the same weights to an engine that joins, with `any_time` also while the
        trainer changes its own.
        """

    def fail(self, index: int, cause: str) -> None:
        """Mark an engine as dead that cannot take the weights."""


class UpdatePeers:
    """All trainer ranks, and the engines that an update targets.

    Args:
        ranks: Ray actors of the trainer, by rank.
        sender: The actors' method that calls a method of their sender.
        engines: The rollout engines.
        deadline_s: Seconds that any call may take.
        logs: Log files of the ranks, for error messages.
    """

    def __init__(
        self,
        ranks: Sequence[ActorHandle[Any]],
        sender: str,
        engines: UpdatableEngines,
        deadline_s: float,
        logs: Sequence[Path] = (),
    ) -> None:
        self._ranks, self._sender, self._logs = list(ranks), sender, logs
        self._engines, self._deadline_s = engines, deadline_s
        self._targets: dict[int, Hashable] = {}
        """Number and incarnation of the engines that are being updated."""
        self.transport: Transport | None = None

    @property
    def targets(self) -> list[int]:
        """Numbers of the engines that are being updated, without lost ones."""
        # another thread may have started a lost engine again, which is not connected
        return [
            index
            for index, incarnation in self._targets.items()
            if self._engines.incarnation(index) == incarnation
        ]

    def target(self, indices: Sequence[int]) -> None:
        """Choose the engines to update."""
        self._targets = {index: self._engines.incarnation(index) for index in indices}

    def call_ranks(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every trainer rank's sender and wait for all."""
        return self.wait_ranks(self.submit_ranks(method, *args, **kwargs), method)

    def submit_ranks(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        calls = [getattr(rank, self._sender) for rank in self._ranks]
        if self._sender == "published_sender":
            # in a thread of its own, beside the calls that train
            calls = [call.options(concurrency_group=PUBLISHED_GROUP) for call in calls]
        return [call.remote(method, *args, **kwargs) for call in calls]

    def wait_ranks(
        self, refs: Sequence[ObjectRef[Any]], doing: str, *, least_s: float = 0.0
    ) -> list[Any]:
        """Return the results of one call per trainer rank; raise an error after the deadline.

        `least_s`: seconds to wait if the deadline is shorter.
        """
        with phase(doing):
            return gather(
                refs,
                names=[f"trainer rank {rank}" for rank in range(len(refs))],
                doing=doing,
                timeout_s=max(self._deadline_s, least_s),
                limit=DEADLINE,
                logs=self._logs,
            )

    def call_engines(self, method: str, *, doing: str) -> dict[int, Any]:
        """Call a method of every target and wait for all."""
        return self.wait_engines(self.submit_engines(method), doing)

    def submit_engines(self, method: str, *args: object) -> dict[int, ObjectRef[Any]]:
        return self._engines.call(method, dict.fromkeys(self.targets, args))

    def wait_engines(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        doing: str,
        *,
        forgive: bool = True,
        least_s: float = 0.0,
    ) -> dict[int, Any]:
        """Return the results of one call per target; remove engines that were lost from targets."""
        with phase(doing):
            results = self._engines.gather(
                refs,
                doing=doing,
                timeout_s=max(self._deadline_s, least_s),
                limit=DEADLINE,
                forgive=forgive,
            )
        lost = [index for index in self._targets if index not in results]
        if lost and self.transport == "nccl":
            raise InfraError(
                f"weights: {doing}: rollout engine {lost[0]} is lost, and the other ranks of its "
                f"process group cannot continue without it (log: logs/engine-{lost[0]}.log)"
            )
        for index in lost:
            del self._targets[index]
        return results


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Add the phase of the update to errors of ranks and engines."""
    try:
        yield
    except MegadapoError as error:
        raise type(error)(f"weights: {doing}: {error}") from None
