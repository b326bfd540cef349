"""The driver's side of the rollout engines: start, deal out groups, update weights, shut down."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather, result_of
from megadapo.errors import InfraError
from megadapo.rollout.activity import EngineActivity
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine import EngineSpec, WeightDtype, WeightsFrom
from megadapo.rollout.failure import describe_failure
from megadapo.rollout.platform import EnginePlatform
from megadapo.rollout.remote_engine import RemoteEngine
from megadapo.rollout.requests import (
    EngineReport,
    GroupRequest,
    GroupResponse,
    StopReport,
)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster

SHUTDOWN_TIMEOUT_S = 30.0
WATCH_S = 2.0
"""Longest time between two looks at whether the engines get on."""
AHEAD = 0.25
"""Responses that wait for a slot, as a share of the slots: while the driver is busy with what came
before, an engine takes the next ones from there."""


class Engines:
    """All engines of a run. Every method either succeeds on all of them or raises InfraError."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.policy_version = 0
        self._engines = list(engines)
        self._config = engines[0].spec.config
        self._in_flight: dict[int, tuple[GroupRequest, int]] = {}
        """By key, each group and the engine that it is on."""
        self._finished: list[GroupResponse] = []
        """Groups that have not been handed back yet; still in flight."""
        self._pending: dict[ObjectRef[Any], int] = {}
        """Calls to submit and to report, and the engine of each."""
        self._submitted: dict[ObjectRef[Any], list[GroupRequest]] = {}

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
        weights_from: WeightsFrom = "trainer",
        shares_gpus: bool = True,
        wait: bool = True,
    ) -> Engines:
        """Start all engines.

        Args:
            model: Hugging Face folder or Hub name.
            dtype: type of weights and activations.
            log_folder: where every engine writes its own log file.
            weights_from: "trainer" leaves the weights random until they are published.
            shares_gpus: whether a trainer works on the same GPUs.
            wait: False returns at once, and `wait_until_ready` must follow.

        Raises:
            InfraError: an engine did not start in time or at all; nothing is left running.
        """
        specs = [
            EngineSpec(
                index=index,
                model=model,
                dtype=dtype,
                max_model_len=max_prompt_tokens + config.max_response_tokens,
                weights_from=weights_from,
                config=config,
                platform=EnginePlatform(gpus=cluster.engine_gpus(index), shares_gpus=shares_gpus),
                log_file=log_folder.resolve() / f"engine-{index}.log",
            )
            for index in range(config.num_engines)
        ]
        engines = cls([RemoteEngine(spec, cluster.engine_options(spec.index)) for spec in specs])
        if wait:
            engines.wait_until_ready()
        return engines

    @property
    def gpus(self) -> list[tuple[int, ...]]:
        """GPU numbers of each engine on its node; empty on a CPU."""
        return [engine.spec.platform.gpus for engine in self._engines]

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """One actor handle per engine."""
        return [engine.actor for engine in self._engines]

    def wait_until_ready(self) -> None:
        """Wait until each engine has answered a request.

        Raises:
            InfraError: as for `start`.
        """
        try:
            self.collect(
                [engine.starting for engine in self._engines],
                doing="start",
                timeout_s=self._config.start_timeout_s,
                limit="rollout.start_timeout_s",
            )
        except BaseException:
            self.shutdown()
            raise
        for engine in self._engines:
            self._pending[engine.report()] = engine.spec.index

    @property
    def room(self) -> int:
        """Responses that may be submitted so that every engine stays just ahead of its slots."""
        return self.room_without(())

    def room_without(self, keys: Collection[int]) -> int:
        """As `room`, if the groups with these keys, which are in flight, were not."""
        wanted = math.ceil(self._config.max_num_seqs * (1 + AHEAD))
        left_out = Counter[int]()
        for group, index in (self._in_flight[key] for key in keys):
            left_out[index] += len(group.seeds)
        # responses of these groups that have ended are no load any more
        loads = [max(0, one.load - left_out[index]) for index, one in enumerate(self._engines)]
        return sum(max(0, wanted - load) for load in loads)

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not handed back."""
        return len(self._in_flight)

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Begin to generate groups, and return at once.

        Each goes whole to the engine with the fewest responses in flight: its members share the
        cache of their prompt. Which engine generates a response, when and beside what does not
        change it on a CPU, nor with rollout.batch_invariant on CUDA.
        """
        shares: dict[int, list[GroupRequest]] = {}
        for group in groups:
            assert group.key not in self._in_flight, f"group {group.key} is in flight already"
            index = min(range(len(self._engines)), key=lambda one: self._engines[one].load)
            self._engines[index].assigned(len(group.seeds))
            self._in_flight[group.key] = (group, index)
            shares.setdefault(index, []).append(group)
        for index, share in shares.items():
            ref = self._engines[index].submit(share)
            self._pending[ref], self._submitted[ref] = index, share

    def finished(self, timeout_s: float | None = None) -> list[GroupResponse]:
        """Wait for groups to finish, and hand them over in no promised order.

        Returns:
            At least one group. None after `timeout_s` seconds, with nothing in flight, or where
            responses have ended so that there is room for more.

        Raises:
            InfraError: an engine died, refused a request or gave no token for
                `rollout.engine_progress_timeout_s`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._in_flight and not self._finished:
            left = deadline - time.monotonic()
            has_news = self._wait(max(0.0, min(left, WATCH_S)))
            if left <= 0 or (has_news and self.room):
                break
        groups, self._finished = self._finished, []
        for group in groups:
            del self._in_flight[group.key]
        return groups

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """End groups that are in flight, all of them for None.

        Args:
            keep: hand over what they have so far; a later request can begin with it.

        Raises:
            InfraError: an engine died, or did not answer in time.
        """
        chosen = set(self._in_flight) if keys is None else self._in_flight.keys() & set(keys)
        indices = sorted({self._in_flight[key][1] for key in chosen})
        answers: list[tuple[StopReport, EngineReport]] = self.collect(
            [self._engines[index].stop(chosen, keep=keep) for index in indices],
            doing="stop",
            timeout_s=self._config.engine_progress_timeout_s,
            limit="rollout.engine_progress_timeout_s",
            engines=indices,
        )
        for index, (_, report) in zip(indices, answers, strict=True):
            self._engines[index].take(report)
        reports = [report for report, _ in answers]
        stopped = {key for report in reports for key in report.keys}
        # the others finished before the engine knew, and are on their way
        while chosen - stopped - {group.key for group in self._finished}:
            self._wait(WATCH_S)
        complete = [group for group in self._finished if group.key in chosen]
        self._finished = [group for group in self._finished if group.key not in chosen]
        num_tokens = sum(_num_new_tokens(self._in_flight[one.key][0], one) for one in complete)
        for key in chosen:
            del self._in_flight[key]
        return StopReport(
            keys=tuple(sorted(chosen)),
            unfinished=(
                *(group for report in reports for group in report.unfinished),
                *(complete if keep else ()),
            ),
            num_tokens=num_tokens + sum(report.num_tokens for report in reports),
        )

    def activity(self) -> list[EngineActivity]:
        """What each engine did since the last call."""
        timeout_s = self._config.engine_progress_timeout_s
        return self.call_all("activity", timeout_s=timeout_s)

    def init_weight_transfer(
        self, init_infos: Sequence[dict[str, Any]], *, timeout_s: float
    ) -> None:
        """Give each engine what its weight-transfer engine needs to know once."""
        method = "init_weight_transfer"
        self.collect(self.call_each(method, init_infos), doing=method, timeout_s=timeout_s)

    def start_weight_update(self, *, timeout_s: float) -> None:
        """Begin an update on every engine; none generates until it is finished."""
        self.call_all("start_weight_update", timeout_s=timeout_s)

    def submit_update(self, update_infos: Sequence[Any]) -> list[ObjectRef[Any]]:
        """Let engine i take update_infos[i] while the trainer sends; `collect` the results."""
        return self.call_each("update_weights", update_infos)

    def finish_weight_update(self, policy_version: int, *, timeout_s: float) -> None:
        """End the update, forget cached keys and values, and mark samples with the version."""
        self.call_all("finish_weight_update", policy_version, timeout_s=timeout_s)
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Give GPU memory to the trainer; nothing to do where engines do not share GPUs."""
        if self._engines[0].spec.platform.sleeps:
            self.call_all("sleep", timeout_s=self._config.start_timeout_s)

    def wake_weights(self) -> None:
        """Take memory for the weights; they hold nothing until they are published."""
        self._wake("weights")

    def wake_cache(self) -> None:
        """Take memory for the key-value cache, after the weights are published."""
        self._wake("kv_cache")

    def call_all(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call a method with the same arguments on every engine and wait for all."""
        refs = [getattr(actor, method).remote(*args) for actor in self.actors]
        return self.collect(refs, doing=method, timeout_s=timeout_s)

    def call_each(self, method: str, arguments: Sequence[object]) -> list[ObjectRef[Any]]:
        """Call a method on engine i with arguments[i], without waiting."""
        return [
            getattr(actor, method).remote(argument)
            for actor, argument in zip(self.actors, arguments, strict=True)
        ]

    def collect(
        self,
        refs: Sequence[ObjectRef[Any]],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        engines: Sequence[int] | None = None,
    ) -> list[Any]:
        """Wait for one call per engine of those listed, of all for None; as `cluster.calls.gather`.

        Raises:
            InfraError: an engine died, failed, or did not answer within `timeout_s` seconds.
        """
        indices = range(len(refs)) if engines is None else engines
        return gather(
            refs,
            names=[f"rollout engine {index}" for index in indices],
            doing=doing,
            timeout_s=timeout_s,
            limit=limit,
            describe_death=lambda place: self._describe_death(indices[place]),
        )

    def shutdown(self) -> None:
        """End every engine and its processes, and wait until they are gone."""
        import ray
        from ray.exceptions import RayError

        refs: list[ObjectRef[Any]] = [actor.shutdown.remote() for actor in self.actors]
        for ref in refs:
            try:
                ray.get(ref, timeout=SHUTDOWN_TIMEOUT_S)
            except RayError:
                # dead or stuck: its reaper ends what it has left when the actor is killed
                continue
        for actor in self.actors:
            ray.kill(actor)
        self._engines, self._pending = [], {}

    def _wake(self, what: str) -> None:
        if self._engines[0].spec.platform.sleeps:
            self.call_all("wake", what, timeout_s=self._config.start_timeout_s)

    def _wait(self, timeout_s: float) -> bool:
        """Take what the engines report within so many seconds; whether there was anything."""
        import ray

        started = time.monotonic()
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for engine in self._engines:
            engine.waited(time.monotonic() - started)
        reports = [report for ref in ready if (report := self._take(ref)) is not None]
        self._check_progress()
        return bool(reports)

    def _take(self, ref: ObjectRef[Any]) -> EngineReport | None:
        """Read a call that has ended; its report, and the next one asked for, if it is one."""
        index, submitted = self._pending.pop(ref), self._submitted.pop(ref, [])
        try:
            report: EngineReport | None = result_of(
                ref,
                name=f"rollout engine {index}",
                doing="generate",
                describe_death=partial(self._describe_death, index),
            )
        except InfraError:
            for group in submitted:
                del self._in_flight[group.key]
                self._engines[index].assigned(-len(group.seeds))
            raise
        if report is None:
            return None
        self._engines[index].take(report)
        self._finished += report.groups
        self._pending[self._engines[index].report()] = index
        return report

    def _check_progress(self) -> None:
        limit_s = self._config.engine_progress_timeout_s
        for engine in self._engines:
            if engine.quiet_s > limit_s:
                raise InfraError(
                    f"rollout engine {engine.spec.index} has work and gave no token for "
                    f"{limit_s:g} s (rollout.engine_progress_timeout_s)"
                )

    def _describe_death(self, index: int) -> str:
        return describe_failure(
            f"rollout engine {index} died", "", self._engines[index].spec.log_file
        )


def _num_new_tokens(request: GroupRequest, response: GroupResponse) -> int:
    begun = sum(len(one.token_ids) for one in request.begun)
    return sum(len(one.token_ids) for one in response.responses) - begun
