"""Waits for calls of Ray actors and turns Ray's errors into megadapo's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.process_log import quote_log
from megadapo.errors import (
    CallCancelledError,
    DataLostError,
    InfraError,
    MegadapoError,
    NodeDiedError,
    NodeOutOfMemoryError,
    ProcessDiedError,
    ProcessHungError,
)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.exceptions import RayError

WATCH_S = 2.0
"""Seconds between two calls of `watch`."""
GRACE_S = 3.0
"""Seconds to wait for further failures before the root cause is chosen."""

_MEMORY = (
    NodeOutOfMemoryError,
    "its node's memory was nearly full, and Ray killed it: give the node more, or put less on it "
    "(fewer ranks or engines a node, trainer.offload, and on the CPU rollout.kv_cache_gib)",
)
_NODE = (NodeDiedError, "its node is gone: is the machine up, and its network?")
KINDS: tuple[tuple[tuple[str, ...], type[InfraError], str], ...] = (
    (("OutOfMemoryError",), *_MEMORY),
    (("NodeDiedError", "LocalRayletDiedError"), *_NODE),
    (
        ("ActorUnavailableError", "RpcError"),
        NodeDiedError,
        "Ray cannot reach it: is its node up, and the network between them?",
    ),
    (
        ("RayActorError", "WorkerCrashedError"),
        ProcessDiedError,
        "if its log does not say why, it was killed: by the kernel for its memory (dmesg), by "
        "a scheduler, or by `ray stop`",
    ),
    (
        ("ObjectStoreFullError", "OutOfDiskError"),
        DataLostError,
        "Ray's object store is full: it needs more room in /dev/shm, and in /tmp to spill to",
    ),
    (
        ("ObjectLostError", "PlasmaObjectNotAvailable"),
        DataLostError,
        "its input is lost; the process or node that held the data has probably died",
    ),
    (("GetTimeoutError",), ProcessHungError, "it did not answer in time"),
    (
        ("TaskCancelledError", "TaskPlacementGroupRemoved", "ActorPlacementGroupRemoved"),
        CallCancelledError,
        "Ray cancelled the call: has another program ended this run's Ray or its slots?",
    ),
    (
        ("RuntimeEnvSetupError", "TaskUnschedulableError", "ActorUnschedulableError"),
        CallCancelledError,
        "Ray could not start it: are all nodes of the run still up?",
    ),
    (
        ("RayError",),
        InfraError,
        "Ray failed; see its own logs: logs/ray in the run's folder, or on the nodes of a cluster "
        "that you started /tmp/ray/session_latest/logs",
    ),
)
"""Names of Ray's errors (a base class covers its subclasses), our error, and what to do."""
# Ray uses one error for all deaths of an actor; only its text tells them apart
_WORDS_OF_MEMORY = ("running low on memory", "OUT_OF_MEMORY")
_WORDS_OF_NODE = ("its node has died", "node was terminated")


class Watch:
    """The checks of a run's processes, which are called while one of them is waited for."""

    def __init__(self, *checks: Callable[[], None]) -> None:
        """Each of `checks` raises the error that ends the run."""
        self._checks = list(checks)
        self._deferred: list[Callable[[], None]] = []

    def add(self, *checks: Callable[[], None], during_updates: bool = True) -> None:
        """Add checks, once their processes have started.

        `during_updates`: whether the trainer's work must end too, which loses its update.
        """
        (self._checks if during_updates else self._deferred).extend(checks)

    def check(
        self, *, without: Callable[[], None] | None = None, during_update: bool = False
    ) -> None:
        """Call every check except the one of the part that waits."""
        # Ray's daemons first: their end explains that of others
        for check in ([] if during_update else self._deferred) + self._checks:
            if check != without:
                check()


def gather(
    calls: Sequence[ObjectRef[Any]],
    *,
    names: Sequence[str],
    doing: str,
    timeout_s: float,
    limit: str = "",
    describe_death: Callable[[int], str] | None = None,
    logs: Sequence[Path] = (),
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """Return the results of concurrent calls, in order; one call per actor.

    Raise the error of an actor, or InfraError if one died, failed otherwise or did not answer in
    time. Of several errors, raise the root cause.

    Args:
        names: name of each actor in messages.
        doing: name of the work in messages.
        timeout_s: seconds until all actors must have answered.
        limit: config key of the timeout.
        describe_death: describes the death of the actor with an index better than Ray does.
        logs: log of each actor's process, for messages; may be on another node.
        watch: called every few seconds; may raise.
    """

    def take(call: ObjectRef[Any], index: int) -> Any:
        death = None if describe_death is None else partial(describe_death, index)
        log = logs[index] if logs else None
        return result_of(call, name=names[index], doing=doing, describe_death=death, log=log)

    deadline = time.monotonic() + timeout_s
    index_of = {call: index for index, call in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    while index_of:
        ended = _next_ended(list(index_of), deadline, watch)
        if not ended:
            silent = list(index_of.values())
            own = [logs[index] for index in silent] if logs else []
            raise timeout_error([names[index] for index in silent], doing, timeout_s, limit, own)
        for call in ended:
            index = index_of.pop(call)
            try:
                results[index] = take(call, index)
            except MegadapoError as first:
                raise _root_cause(first, index_of, take) from None
    return results


def _next_ended(
    calls: list[ObjectRef[Any]], deadline: float, watch: Callable[[], None] | None
) -> list[ObjectRef[Any]]:
    """Wait for a call to end and return all that have; return none at the deadline."""
    import ray

    while True:
        remaining = max(0.0, deadline - time.monotonic())
        slice_s = remaining if watch is None else min(remaining, WATCH_S)
        ready, _ = ray.wait(calls, num_returns=1, timeout=slice_s)
        if watch is not None:
            watch()
        if ready:
            # one by one, hundreds of calls would take a wait for all others each
            return ray.wait(calls, num_returns=len(calls), timeout=0)[0] or ready
        if slice_s >= remaining:
            return []


def result_of(
    call: ObjectRef[Any],
    *,
    name: str,
    doing: str,
    describe_death: Callable[[], str] | None = None,
    log: Path | None = None,
) -> Any:
    """Return the result of a call that has ended, or raise as `gather`.

    Args:
        describe_death: describes the death of the actor's process better than Ray does.
        log: of the actor's process; its last lines are quoted if the process died.
    """
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call)
    except RayError as error:
        ours = translate_error(error, name, doing, describe_death)
        if log is not None and isinstance(ours, ProcessDiedError):
            ours = type(ours)(f"{ours}{quote_log(log)}")
        raise ours from None


def timeout_error(
    names: Sequence[str], doing: str, timeout_s: float, limit: str, logs: Sequence[Path] = ()
) -> ProcessHungError:
    """Return the error of processes that did not answer in time.

    `logs`: hold the stacks of the processes once these have been killed.
    """
    key = f" ({limit})" if limit else ""
    where = f"; stacks: {', '.join(map(str, logs))}" if logs else ""
    return ProcessHungError(
        f"{', '.join(names)} did not finish {doing} within {timeout_s:g} s{key}{where}"
    )


def translate_error(
    error: RayError, name: str, doing: str, describe_death: Callable[[], str] | None = None
) -> MegadapoError:
    """Return megadapo's error for the error that a call raised, with what to do about it."""
    from ray.exceptions import RayActorError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegadapoError):
            return cause
        if not isinstance(cause, RayError):
            return InfraError(f"{name} failed in {doing}: {cause}")
        # the call failed before it ran, for example because its arguments are lost
        error = cause
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return ProcessDiedError(f"{name} could not start: {error}")
    kind, hint = _kind(error)
    if kind is ProcessDiedError and describe_death is not None:
        return ProcessDiedError(describe_death())
    if issubclass(kind, ProcessDiedError):
        return kind(f"{name} died during {doing}: {hint}")
    cause = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return kind(f"{name} did not finish {doing}: {hint} ({cause})")


def _kind(error: RayError) -> tuple[type[InfraError], str]:
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        text = str(error)
        if any(words in text for words in _WORDS_OF_MEMORY):
            return _MEMORY
        if any(words in text for words in _WORDS_OF_NODE):
            return _NODE
    names = {kind.__name__ for kind in type(error).__mro__}
    return next((ours, hint) for theirs, ours, hint in KINDS if names.intersection(theirs))


def _root_cause(
    first: MegadapoError,
    index_of: dict[ObjectRef[Any], int],
    take: Callable[[ObjectRef[Any], int], Any],
) -> MegadapoError:
    """Return the error that explains the others: a specific one, else a death, else the first.

    Processes that lose their partner fail too, often before Ray notices the death.
    """
    import ray

    if not index_of:
        return first
    errors = [first]
    others, _ = ray.wait(list(index_of), num_returns=len(index_of), timeout=GRACE_S)
    for call in others:
        try:
            take(call, index_of[call])
        except MegadapoError as error:
            errors.append(error)
    specific = [error for error in errors if not isinstance(error, InfraError)]
    died = [error for error in errors if isinstance(error, ProcessDiedError)]
    return (specific + died + errors)[0]
