"""The driver's side of the rollout engines: start, deal out groups, update weights, shut down."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather, late, result_of
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine import EngineSpec, RolloutEngine, WeightDtype, WeightsFrom
from megadapo.rollout.failure import describe_failure
from megadapo.rollout.platform import EnginePlatform
from megadapo.rollout.requests import GroupRequest, GroupResponse, SamplingSettings

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster

SHUTDOWN_TIMEOUT_S = 30.0


class Engines:
    """All engines of a run. Every method either succeeds on all of them or raises InfraError."""

    def __init__(self, actors: Sequence[ActorHandle[Any]], specs: Sequence[EngineSpec]) -> None:
        self.actors = list(actors)
        self.policy_version = 0
        self._specs = list(specs)
        self._config = specs[0].config
        self._starting = [actor.start.remote() for actor in self.actors]

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
        actors = [_start_actor(spec, cluster.engine_options(spec.index)) for spec in specs]
        engines = cls(actors, specs)
        if wait:
            engines.wait_until_ready()
        return engines

    @property
    def gpus(self) -> list[tuple[int, ...]]:
        """GPU numbers of each engine on its node; empty on a CPU."""
        return [spec.platform.gpus for spec in self._specs]

    def wait_until_ready(self) -> None:
        """Wait until each engine has answered a request.

        Raises:
            InfraError: as for `start`.
        """
        try:
            self.collect(
                self._starting,
                doing="start",
                timeout_s=self._config.start_timeout_s,
                limit="rollout.start_timeout_s",
            )
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self, groups: Sequence[GroupRequest], settings: SamplingSettings
    ) -> Iterator[GroupResponse]:
        """Yield the responses of each group as it finishes, in no promised order.

        Group `key` goes to engine `key % num_engines`, so that who generates what does not depend
        on which engine is faster.
        """
        shares: list[list[GroupRequest]] = [[] for _ in self.actors]
        for group in groups:
            shares[group.key % len(self.actors)].append(group)
        streams = {
            actor.generate.options(num_returns="streaming").remote(share, settings): index
            for index, (actor, share) in enumerate(zip(self.actors, shares, strict=True))
            if share
        }
        yield from self._merge(streams)

    def init_weight_transfer(
        self, init_infos: Sequence[dict[str, Any]], *, timeout_s: float
    ) -> None:
        """Give each engine what its weight-transfer engine needs to know once."""
        method = "init_weight_transfer"
        self.collect(self.submit(method, init_infos), doing=method, timeout_s=timeout_s)

    def start_weight_update(self, *, timeout_s: float) -> None:
        """Begin an update on every engine; none generates until it is finished."""
        self.call_all("start_weight_update", timeout_s=timeout_s)

    def submit_update(self, update_infos: Sequence[Any]) -> list[ObjectRef[Any]]:
        """Let engine i take update_infos[i] while the trainer sends; `collect` the results."""
        return self.submit("update_weights", update_infos)

    def finish_weight_update(self, policy_version: int, *, timeout_s: float) -> None:
        """End the update, forget cached keys and values, and mark samples with the version."""
        self.call_all("finish_weight_update", policy_version, timeout_s=timeout_s)
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Give GPU memory to the trainer; nothing to do where engines do not share GPUs."""
        if self._specs[0].platform.sleeps:
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

    def submit(self, method: str, arguments: Sequence[object]) -> list[ObjectRef[Any]]:
        """Call a method on engine i with arguments[i], without waiting."""
        return [
            getattr(actor, method).remote(argument)
            for actor, argument in zip(self.actors, arguments, strict=True)
        ]

    def collect(
        self, refs: Sequence[ObjectRef[Any]], *, doing: str, timeout_s: float, limit: str = ""
    ) -> list[Any]:
        """Wait for one call per engine; arguments as for `cluster.calls.gather`.

        Raises:
            InfraError: an engine died, failed, or did not answer within `timeout_s` seconds.
        """
        return gather(
            refs,
            names=[f"rollout engine {index}" for index in range(len(refs))],
            doing=doing,
            timeout_s=timeout_s,
            limit=limit,
            describe_death=self._describe_death,
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
        self.actors = []

    def _wake(self, what: str) -> None:
        if self._specs[0].platform.sleeps:
            self.call_all("wake", what, timeout_s=self._config.start_timeout_s)

    def _merge(self, streams: dict[Any, int]) -> Iterator[GroupResponse]:
        """Yield from all engines' streams until each has ended."""
        import ray

        allowed_s = self._config.round_timeout_s
        deadline = time.monotonic() + allowed_s
        while streams:
            left = max(0.0, deadline - time.monotonic())
            ready: list[Any]
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=left)
            if not ready:
                stuck = ", ".join(f"rollout engine {index}" for index in sorted(streams.values()))
                raise late(stuck, "a round", allowed_s, "rollout.round_timeout_s")
            try:
                ref: ObjectRef[Any] = next(ready[0])
            except StopIteration:
                del streams[ready[0]]
                continue
            index = streams[ready[0]]
            yield from result_of(
                ref,
                name=f"rollout engine {index}",
                doing="generate",
                describe_death=partial(self._describe_death, index),
            )

    def _describe_death(self, index: int) -> str:
        return describe_failure(f"rollout engine {index} died", "", self._specs[index].log_file)


def _start_actor(spec: EngineSpec, options: dict[str, Any]) -> ActorHandle[Any]:
    import ray

    actor: Any = ray.remote(RolloutEngine)  # with options, Ray loses its type
    handle: ActorHandle[Any] = actor.options(max_restarts=0, max_task_retries=0, **options).remote(
        spec
    )
    return handle
