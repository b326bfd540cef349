"""The trainer's ranks and the engines of a weight update, and calls of all of them in time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megadapo.cluster.calls import gather
from megadapo.errors import InfraError, MegadapoError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

DEADLINE = "weights.deadline_s"


class UpdatableEngines(Protocol):
    """What an update needs of the rollout engines; `rollout.engines.Engines` is one."""

    @property
    def policy_version(self) -> int:
        """Of the weights published last."""
        ...

    def updatable(self) -> list[int]:
        """Numbers of the engines that an update can reach now."""
        ...

    def incarnation(self, index: int) -> Hashable:
        """What changes when another process takes an engine's place."""
        ...

    def gpus(self, index: int) -> tuple[str, ...]:
        """What an engine's node calls its GPUs; empty on a CPU."""
        ...

    def call(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, ObjectRef[Any]]:
        """Call a method of the engines with these numbers, without waiting."""
        ...

    def gather(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        forgive: bool = True,
    ) -> dict[int, Any]:
        """Results of calls, without those of engines that were lost over them.

        `forgive`: an engine that answers with an error is lost as well; else the error is raised.
        """
        ...

    def finish_weight_update(
        self, indices: Sequence[int], policy_version: int, *, timeout_s: float
    ) -> None: ...


class Parties:
    """Calls methods of every rank, or of every engine that is being updated.

    Args:
        ranks: Ray actors of the trainer, by rank.
        sender: The actors' method that calls a method of their sender.
        engines: The rollout engines.
        deadline_s: Seconds that any call may take.
        logs: Of the ranks, for messages.
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
        self.targets: list[int] = []
        """Numbers of the engines that are being updated; one that is lost is left out."""
        self.transport = ""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every trainer rank's sender and wait for all."""
        return self.wait(self.submit(method, *args, **kwargs), method)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        return [getattr(rank, self._sender).remote(method, *args, **kwargs) for rank in self._ranks]

    def wait(self, refs: Sequence[ObjectRef[Any]], what: str) -> list[Any]:
        """Results of one call per trainer rank, in time or not at all."""
        with phase(what):
            return gather(
                refs,
                names=[f"trainer rank {rank}" for rank in range(len(refs))],
                doing=what,
                timeout_s=self._deadline_s,
                limit=DEADLINE,
                logs=self._logs,
            )

    def call_engines(self, method: str, *args: object) -> dict[int, ObjectRef[Any]]:
        return self._engines.call(method, dict.fromkeys(self.targets, args))

    def gather(
        self, refs: Mapping[int, ObjectRef[Any]], what: str, *, forgive: bool = True
    ) -> dict[int, Any]:
        """Results of one call per engine; those that were lost over it are targets no more."""
        with phase(what):
            results = self._engines.gather(
                refs,
                doing=what,
                timeout_s=self._deadline_s,
                limit=DEADLINE,
                forgive=forgive,
            )
        lost = [index for index in self.targets if index not in results]
        if lost and self.transport == "nccl":
            raise InfraError(
                f"weights: {what}: rollout engine {lost[0]} is lost, and the ranks of one process "
                f"group cannot go on without it (log: logs/engine-{lost[0]}.log)"
            )
        self.targets = [index for index in self.targets if index in results]
        return results


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say in which phase of an update a rank or an engine failed or did not answer."""
    try:
        yield
    except MegadapoError as error:
        raise type(error)(f"weights: {what}: {error}") from None
