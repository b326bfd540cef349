"""What Ray raises for a call, as errors of ours that say what to do: the only place that knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megadapo.errors import (
    CallCancelledError,
    DataLostError,
    InfraError,
    MegadapoError,
    NodeDiedError,
    OutOfMemory,
    ProcessDiedError,
    ProcessHungError,
)

if TYPE_CHECKING:
    from ray.exceptions import RayError

_MEMORY = (
    OutOfMemory,
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
        "where its log does not say why, it was killed: by the kernel for its memory (dmesg), by "
        "a scheduler, or by `ray stop`",
    ),
    (
        ("ObjectStoreFullError", "OutOfDiskError"),
        DataLostError,
        "Ray's object store is full: it needs more room in /dev/shm, and in /tmp/ray to spill to",
    ),
    (
        ("ObjectLostError", "PlasmaObjectNotAvailable"),
        DataLostError,
        "what it was to read is gone, as when the process or the node that held it has died",
    ),
    (("GetTimeoutError",), ProcessHungError, "it gave no answer in time"),
    (
        ("TaskCancelledError", "TaskPlacementGroupRemoved", "ActorPlacementGroupRemoved"),
        CallCancelledError,
        "Ray took it back: has another program ended this run's Ray or its slots?",
    ),
    (
        ("RuntimeEnvSetupError", "TaskUnschedulableError", "ActorUnschedulableError"),
        CallCancelledError,
        "Ray could not start it: are the nodes still there that the run began with?",
    ),
    (("RayError",), InfraError, "Ray failed; its own logs, /tmp/ray/session_latest/logs, say more"),
)
"""Names of Ray's errors (a base stands for all that derive from it), ours, and what to do."""
# Ray has one error for all deaths of an actor, and says in words which it was
_WORDS_OF_MEMORY = ("running low on memory", "OUT_OF_MEMORY")
_WORDS_OF_NODE = ("its node has died", "node was terminated")


def translated(
    error: RayError, name: str, doing: str, describe_death: Callable[[], str] | None = None
) -> MegadapoError:
    """The error of ours for what a call raised.

    Args:
        name: what the called process is called in messages.
        doing: what it was called for.
        describe_death: says that its process is gone and why, where more is known than Ray knows.
    """
    from ray.exceptions import RayActorError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegadapoError):
            return cause
        if not isinstance(cause, RayError):
            return InfraError(f"{name} failed in {doing}: {cause}")
        # what the call met before it did anything: its arguments are lost, say
        error = cause
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return ProcessDiedError(f"{name} could not start: {error}")
    kind, hint = _kind(error)
    if kind is ProcessDiedError and describe_death is not None:
        return ProcessDiedError(describe_death())
    if issubclass(kind, ProcessDiedError):
        return kind(f"{name} died during {doing}: {hint}")
    return kind(f"{name} did not finish {doing}: {hint} ({_first_line(error)})")


def _kind(error: RayError) -> tuple[type[InfraError], str]:
    """Its type among ours, and what to do."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        text = str(error)
        if any(words in text for words in _WORDS_OF_MEMORY):
            return _MEMORY
        if any(words in text for words in _WORDS_OF_NODE):
            return _NODE
    names = {kind.__name__ for kind in type(error).__mro__}
    return next((ours, hint) for theirs, ours, hint in KINDS if names.intersection(theirs))


def _first_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
