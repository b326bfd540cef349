"""Translation of Ray's errors: each becomes a megadapo error that says what to do."""

import inspect

import pytest
from ray import exceptions as of_ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from megadapo.cluster.calls import KINDS, translate_error
from megadapo.errors import (
    CallCancelledError,
    DataError,
    DataLostError,
    InfraError,
    NodeDiedError,
    NodeOutOfMemoryError,
    ProcessDiedError,
    ProcessHungError,
)


def actor_died(message: str) -> of_ray.ActorDiedError:
    return of_ray.ActorDiedError(
        ActorDiedErrorContext(error_message=message, actor_id=b"a" * 16, pid=17)
    )


CASES = [
    (actor_died("Worker unexpectedly exits with a connection error code 2."), ProcessDiedError),
    (actor_died("Worker exit type: NODE_OUT_OF_MEMORY"), NodeOutOfMemoryError),
    (
        actor_died("the worker was killed due to the node running low on memory."),
        NodeOutOfMemoryError,
    ),
    (actor_died("The actor died because its node has died. Node Id: 5a"), NodeDiedError),
    (of_ray.OutOfMemoryError("task was killed"), NodeOutOfMemoryError),
    (of_ray.NodeDiedError("unreachable"), NodeDiedError),
    (of_ray.LocalRayletDiedError(), NodeDiedError),
    (of_ray.ActorUnavailableError("no route", b"a" * 16), NodeDiedError),
    (of_ray.WorkerCrashedError(), ProcessDiedError),
    (of_ray.ObjectLostError("5a", None, ""), DataLostError),
    (of_ray.OwnerDiedError("5a", b"", ""), DataLostError),
    (of_ray.ObjectStoreFullError("full"), DataLostError),
    (of_ray.GetTimeoutError("Get timed out"), ProcessHungError),
    (of_ray.TaskCancelledError(), CallCancelledError),
    (of_ray.ActorUnschedulableError("no node"), CallCancelledError),
    (of_ray.RuntimeEnvSetupError("no disk"), CallCancelledError),
    (of_ray.RaySystemError("internal"), InfraError),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda value: type(value).__name__)
def test_every_ray_error_has_a_type_and_a_hint(error, kind):
    ours = translate_error(error, "trainer rank 1", "update")
    assert type(ours) is kind
    text = str(ours)
    assert text.startswith("trainer rank 1 ") and "update: " in text
    assert "\n" not in text and len(text) > 60


def test_error_names_exist_in_installed_ray():
    """If Ray renames a base class, its subclasses would lose their hint."""
    known = {name for name, kind in inspect.getmembers(of_ray) if inspect.isclass(kind)}
    assert {name for theirs, _, _ in KINDS for name in theirs} <= known


def test_ray_explains_memory_deaths_and_the_caller_others():
    def describe() -> str:
        return "engine 0 died: out of blocks"

    plain = translate_error(actor_died("exit"), "engine 0", "start", describe)
    assert str(plain) == "engine 0 died: out of blocks"
    for_memory = translate_error(actor_died("NODE_OUT_OF_MEMORY"), "engine 0", "start", describe)
    assert type(for_memory) is NodeOutOfMemoryError and "memory was nearly full" in str(for_memory)


def test_own_errors_keep_their_type_and_failed_calls_are_translated():
    of_data = of_ray.RayTaskError("f", "", DataError("prompt 3 is empty"))
    assert isinstance(translate_error(of_data, "x", "y"), DataError)
    lost = of_ray.RayTaskError("f", "", of_ray.ObjectLostError("5a", None, ""))
    assert type(translate_error(lost, "x", "y")) is DataLostError
    other = translate_error(of_ray.RayTaskError("f", "", ValueError("seven")), "x", "y")
    assert type(other) is InfraError and "x failed in y: seven" in str(other)


def test_failed_actor_constructor_gives_its_cause():
    cause = of_ray.RayTaskError("__init__", "Traceback: no such device", ValueError("7"))
    error = translate_error(of_ray.ActorDiedError.from_task_error(cause), "trainer rank 0", "start")
    assert "trainer rank 0 could not start" in str(error) and "no such device" in str(error)
