"""Waiting for calls of Ray actors, and naming the process that is to blame when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.process_log import quoted
from megadapo.cluster.ray_errors import translated
from megadapo.errors import InfraError, MegadapoError, ProcessDiedError, ProcessHungError

if TYPE_CHECKING:
    from ray import ObjectRef

WATCH_S = 2.0
"""Longest time between two looks at what else may fail while calls are waited for."""
GRACE_S = 3.0
"""How long other calls may take to fail as well, so that the root cause can be told."""


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
    """The results of calls that run at once, in order.

    Args:
        calls: one call per actor.
        names: what each actor is called in messages.
        doing: what they do, for messages.
        timeout_s: seconds until all of them must have answered.
        limit: the key of the configuration that says so.
        describe_death: what to say of the actor with this index when its process is gone.
        logs: of the actors' processes, for messages; they may lie where this process sees none.
        watch: called every few seconds; may raise.

    Raises:
        MegadapoError: what an actor raised; InfraError where one died, failed otherwise, or gave
            no answer in time. Of several errors the one that explains the others.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    index_of = {call: index for index, call in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    outcome = _Outcome(names, doing, describe_death, logs)
    while index_of:
        remaining = max(0.0, deadline - time.monotonic())
        slice_s = remaining if watch is None else min(remaining, WATCH_S)
        ready, _ = ray.wait(list(index_of), num_returns=1, timeout=slice_s)
        if watch is not None:
            watch()
        if not ready and slice_s < remaining:
            continue
        if not ready:
            silent = list(index_of.values())
            own = [logs[index] for index in silent] if logs else []
            raise late([names[index] for index in silent], doing, timeout_s, limit, own)
        index = index_of.pop(ready[0])
        try:
            results[index] = outcome.of(ready[0], index)
        except MegadapoError as first:
            raise _root_cause(first, index_of, outcome) from None
    return results


def result_of(
    call: ObjectRef[Any],
    *,
    name: str,
    doing: str,
    describe_death: Callable[[], str],
) -> Any:
    """The result of a call that has ended; errors as for `gather`."""
    return _Outcome([name], doing, lambda _: describe_death()).of(call, 0)


def late(
    names: Sequence[str], doing: str, timeout_s: float, limit: str, logs: Sequence[Path] = ()
) -> ProcessHungError:
    """The error of processes that did not answer in time.

    `logs`: of these, which have their stacks once they are ended.
    """
    key = f" ({limit})" if limit else ""
    where = f"; stacks: {', '.join(map(str, logs))}" if logs else ""
    return ProcessHungError(
        f"{', '.join(names)} did not finish {doing} within {timeout_s:g} s{key}{where}"
    )


class _Outcome:
    """Turns what Ray raises for a call into errors of ours."""

    def __init__(
        self,
        names: Sequence[str],
        doing: str,
        describe_death: Callable[[int], str] | None = None,
        logs: Sequence[Path] = (),
    ) -> None:
        self._names = names
        self._doing = doing
        self._describe_death = describe_death
        self._logs = logs

    def of(self, call: ObjectRef[Any], index: int) -> Any:
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(call)
        except RayError as error:
            describe = self._describe_death
            death = None if describe is None else partial(describe, index)
            ours = translated(error, self._names[index], self._doing, death)
            if self._logs and isinstance(ours, ProcessDiedError):
                ours = type(ours)(f"{ours}{quoted(self._logs[index])}")
            raise ours from None


def _root_cause(
    first: MegadapoError, index_of: dict[ObjectRef[Any], int], outcome: _Outcome
) -> MegadapoError:
    """The error that explains the others: a named one, else a death, else the first.

    Processes that lose their partner fail too, and often sooner than Ray knows of the death.
    """
    import ray

    if not index_of:
        return first
    errors = [first]
    others, _ = ray.wait(list(index_of), num_returns=len(index_of), timeout=GRACE_S)
    for call in others:
        try:
            outcome.of(call, index_of[call])
        except MegadapoError as error:
            errors.append(error)
    named = [error for error in errors if not isinstance(error, InfraError)]
    died = [error for error in errors if isinstance(error, ProcessDiedError)]
    return (named + died + errors)[0]
