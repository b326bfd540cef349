"""The engine processes of a run: their start, calls, weight updates, restarts and end."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megadapo.cluster.calls import Watch, gather, timeout_error
from megadapo.cluster.config import START_TIMEOUT_S
from megadapo.cluster.places import Place
from megadapo.cluster.process_log import engine_log
from megadapo.errors import InfraError, ProcessDiedError
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.spec import EngineSpec, WeightDtype, WeightsFrom
from megadapo.rollout.pool.handle import EngineHandle, EngineIncarnation
from megadapo.rollout.types import EngineActivity

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster

LEAVE_TIMEOUT_S = 5.0
"""Seconds that an engine has to end its own processes before they are killed from outside."""
SHUTDOWN_TIMEOUT_S = 30.0
MAX_RESTARTS = 3
"""Restarts of a dead engine in any RESTART_WINDOW_S; then it starts again when the time is over."""
RESTART_WINDOW_S = 3600.0
NO_ANSWER = ("ending", "ended", "gone")
"""States of an engine without a process."""
MIN_ENGINES = 0.5
"""Share of the engines below which the run ends: a restart of the driver starts all of them."""


class EnginePool:
    """All engine processes of a run; a dead one is started again and gets the current weights.

    One thread may publish weights while another one generates; see `Engines`. Engines may join and
    leave within `unless_busy`.
    """

    def __init__(self, handles: Sequence[EngineHandle], watch: Watch | None = None) -> None:
        """`watch`: checks that are called every few seconds while waiting for groups."""
        self.policy_version = 0
        self._watch = watch or Watch()
        self._handles = {handle.spec.index: handle for handle in handles}
        self._model_handle, self._spec = handles[0], handles[0].spec
        self._config = self._spec.config
        self._warnings: list[str] = []
        self._republish: Callable[[int], object] | None = None
        self._weights_are_current = False
        """Whether the trainer can still send the weights that it published last."""
        self._trainer_has_gpus = False
        """Whether the trainer uses the memory of these engines' GPUs, so that none may start."""
        self._republishes_any_time = False
        """Whether the trainer keeps the weights that it published last while it changes its own."""
        self._lock = threading.RLock()
        self._publishing = threading.Lock()
        """Held during a publication; also its own thread must not begin another one."""

    @classmethod
    def start(
        cls,
        config: RolloutConfig,
        cluster: Cluster,
        *,
        model: str,
        dtype: WeightDtype,
        max_prompt_tokens: int,
        log_folder: Path,
        numbers: Sequence[int] | None = None,
        weights_from: WeightsFrom = "trainer",
        shares_gpus: bool = True,
        returns_experts: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
        watch: Watch | None = None,
    ) -> Self:
        """Start engines; `wait_until_ready` waits for them.

        Args:
            numbers: the cluster's engines to start; None: the first `config.num_engines`.
            weights_from: "trainer" leaves the weights random until they are published.
            watch: checks of the run's other processes.
        """
        specs = [
            EngineSpec(
                index=index,
                model=model,
                dtype=dtype,
                max_model_len=max_prompt_tokens + config.max_response_tokens,
                weights_from=weights_from,
                config=config,
                gpus=cluster.engine_gpus(index),
                shares_gpus=shares_gpus,
                log_file=engine_log(log_folder.resolve(), index),
                returns_experts=returns_experts,
                start_timeout_s=start_timeout_s,
            )
            for index in (range(config.num_engines) if numbers is None else numbers)
        ]
        handles = [EngineHandle(spec, cluster.engine_options(spec.index)) for spec in specs]
        return cls(handles, watch)

    def wait_until_ready(self) -> None:
        """Wait until each engine has answered a request.

        Raises:
            InfraError: one did not start in time or at all; no process is left running.
        """
        engines = list(self._handles.values())
        try:
            gather(
                [engine.awaited for engine in engines if engine.awaited is not None],
                names=[engine.name for engine in engines],
                doing="start",
                timeout_s=self._spec.start_timeout_s,
                limit="cluster.start_timeout_s",
                describe_death=lambda index: engines[index].describe_death(),
            )
        except BaseException:
            self.shutdown()
            raise
        for engine in engines:
            engine.started()

    def shutdown(self) -> None:
        """End all engines and their processes, and wait for that."""
        import ray
        from ray.exceptions import RayError

        engines = [engine for engine in self._handles.values() if engine.state not in NO_ANSWER]
        calls: dict[ObjectRef[Any], EngineHandle] = {
            engine.actor.shutdown.remote(): engine for engine in engines
        }
        if calls:
            ray.wait(list(calls), num_returns=len(calls), timeout=LEAVE_TIMEOUT_S)
        for call, engine in calls.items():
            try:
                ray.get(call, timeout=0)
                ray.kill(engine.actor)
                engine.give_up()
            except RayError:
                engine.end()  # dead or stuck
        ending = [engine.awaited for engine in self._handles.values() if engine.awaited is not None]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=SHUTDOWN_TIMEOUT_S)
        self._handles = {}

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """One actor handle per engine."""
        return [engine.actor for engine in self._handles.values()]

    @property
    def profile_folders(self) -> dict[int, Path]:
        """Folders of the traces of vLLM's profiler, by engine number."""
        return {index: engine.spec.profile_folder for index, engine in self._handles.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens generated by the current engine processes, as of their last reports."""
        return sum(engine.num_tokens for engine in self._handles.values())

    @property
    def shares_gpus(self) -> bool:
        """Whether the engines use the trainer's GPUs, or a CPU's memory, in turns with it."""
        return self._spec.shares_gpus

    def activity(self) -> list[EngineActivity]:
        """Return the activity of each engine since the last call, by number."""
        activities = self.call_all("activity", self._config.engine_progress_timeout_s)
        staying = [index for index, engine in self._handles.items() if engine.leave_at is None]
        return [
            activities.get(index, EngineActivity()) for index in sorted({*staying, *activities})
        ]

    def drain_warnings(self) -> list[str]:
        """Return one line for every engine that died since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def updatable(self) -> list[int]:
        """Return the numbers of the engines that an update can reach and that need it."""
        return [
            engine.spec.index for engine in self._present if engine.leave_at is None or engine.load
        ]

    def incarnation(self, index: int) -> EngineIncarnation:
        """Return an identifier of an engine's process, which changes with a restart."""
        return self._handles[index].incarnation

    def gpus(self, index: int) -> tuple[str, ...]:
        """Return the numbers of an engine's GPUs on its node; empty on a CPU."""
        return self._handles[index].spec.gpus

    def call(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, ObjectRef[Any]]:
        """Call a method of the engines with these numbers, without waiting.

        Engines that another thread has found dead are left out.
        """
        with self._lock:
            return {
                index: getattr(self._handles[index].actor, method).remote(*values)
                for index, values in arguments.items()
                if self._handles[index].state not in NO_ANSWER
            }

    def gather(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        forgive: bool = True,
    ) -> dict[int, Any]:
        """Return the results of one call per engine, by number, without those of dead engines.

        An engine that dies or does not answer in time counts as dead.

        Args:
            forgive: mark an engine that answers with an error as dead; False raises the error.

        Raises:
            InfraError: too few engines are left.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        called = {index: (self._handles[index], self.incarnation(index)) for index in refs}
        results: dict[int, Any] = {}
        for index, ref in refs.items():
            engine, incarnation = called[index]
            hangs = not ray.wait([ref], timeout=max(0.0, deadline - time.monotonic()))[0]
            cause = str(timeout_error([engine.name], doing, timeout_s, limit))
            if not hangs:
                try:
                    results[index] = engine.read(ref, doing)
                    continue
                except InfraError as error:
                    if not forgive and not isinstance(error, ProcessDiedError):
                        raise
                    cause = str(error)
            with self._lock:
                # another thread may have found it dead already
                if engine.incarnation == incarnation and engine.state not in NO_ANSWER:
                    self.mark_dead(engine, cause, hangs=hangs)
        return results

    def call_all(self, method: str, timeout_s: float, *arguments: object) -> dict[int, Any]:
        """Call a method of all engines that answer, and return the results by number."""
        with self._lock:
            refs = self.call(method, {index: arguments for index in self.updatable()})
            return self.gather(refs, doing=method, timeout_s=timeout_s)

    def mark_dead(self, engine: EngineHandle, cause: str, *, hangs: bool = False) -> None:
        """End an engine, and restart it now, or when the limit of restarts allows it.

        A running engine that dies while the trainer has its GPU does not count towards the limit.

        `hangs`: its processes are still alive; write their stacks to its log.

        Raises:
            InfraError: too few engines are left.
        """
        is_free = self._trainer_has_gpus and engine.state != "starting"
        engine.end(hangs=hangs)
        if hangs:
            cause = f"{cause}; stacks: {engine.spec.log_file}"
        if engine.leave_at is not None:
            self._warnings.append(f"{cause}; it was leaving")
            return
        if is_free:
            action = "restarted when the trainer leaves its GPU"
        else:
            number = engine.plan_restart(MAX_RESTARTS, RESTART_WINDOW_S)
            action = f"restart {number} of {MAX_RESTARTS} an hour"
        now = time.monotonic()
        if engine.start_at > now:
            action = (
                f"not restarted: the limit of {MAX_RESTARTS} an hour is reached for "
                f"{(engine.start_at - now) / 60:.0f} more minutes"
            )
        self._warnings.append(f"{cause}; {action}")
        present = [engine for engine in self._handles.values() if engine.leave_at is None]
        # an engine that has never served is no loss, unless there is no other one
        staying = [engine for engine in present if not engine.is_new] or present
        total, num_left = len(staying), sum(engine.start_at <= now for engine in staying)
        if num_left < MIN_ENGINES * total:
            left = f"only {num_left} of {total} engines are" if num_left else "no engine is"
            raise InfraError(f"{cause}; {action}; {left} left, and a restart of the run starts all")

    def on_update_start(self) -> None:
        """Stop republishing: the trainer's weights are about to change."""
        if not self._republishes_any_time:
            with self._publishing:
                self._weights_are_current = False

    def on_update_done(self) -> None:
        """Allow republishing: the trainer has the weights that these engines received last."""
        self._weights_are_current = True

    def finish_weight_update(
        self,
        indices: Sequence[int],
        policy_version: int,
        *,
        timeout_s: float,
        republish: Callable[[int], object],
        any_time: bool = False,
    ) -> None:
        """End an update: clear cached keys and values, and mark samples with the version.

        Args:
            republish: gives the same weights to an engine that joins or is started again.
            any_time: whether it can also while the trainer changes its weights.
        """
        method = "finish_weight_update"
        refs = self.call(method, {index: (policy_version,) for index in indices})
        done = self.gather(refs, doing=method, timeout_s=timeout_s)
        with self._lock:
            for engine in self._present:
                if engine.spec.index in done:
                    engine.serve()
            self.policy_version, self._republish = policy_version, republish
            self._republishes_any_time = any_time
            self.on_update_done()

    @property
    def _serving(self) -> list[EngineHandle]:
        """Engines that can generate."""
        return [engine for engine in self._handles.values() if engine.state == "serving"]

    @property
    def _present(self) -> list[EngineHandle]:
        """Engines that answer calls."""
        return [
            engine
            for engine in self._handles.values()
            if engine.state in ("serving", "stale_weights")
        ]

    def _update_stale_engines(self) -> None:
        """Publish the current weights to engines that joined or restarted, if the trainer can."""
        stale = [engine for engine in self._handles.values() if engine.state == "stale_weights"]
        # a publication that is under way reaches some of them, and the others wait for its end
        if not stale or self._republish is None or not self._publishing.acquire(blocking=False):
            return
        try:
            for engine in stale:
                if self._weights_are_current and engine.leave_at is None:
                    self._republish(engine.spec.index)
        finally:
            self._publishing.release()

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

    def members(self) -> list[EngineHandle]:
        """Return all engines; any thread may call it."""
        return list(self._handles.values())

    def fail(self, index: int, cause: str) -> None:
        """Mark an engine as dead that cannot take the weights."""
        self.mark_dead(self._handles[index], cause, hangs=True)

    def warn(self, *warnings: str) -> None:
        """Add lines for the log, which `drain_warnings` returns."""
        self._warnings += warnings

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
            if engine.leave_at is None or engine.state in NO_ANSWER:
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
