"""The driver's side of the rollout engines: start, deal out groups, update weights, shut down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.cluster.clock import ClockReading
from megadapo.rollout.activity import EngineActivity
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.dispatch import Dispatcher
from megadapo.rollout.engine_spec import EngineSpec, WeightDtype, WeightsFrom
from megadapo.rollout.fleet import describe_death
from megadapo.rollout.platform import EnginePlatform
from megadapo.rollout.remote_engine import Place, RemoteEngine

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster

SHUTDOWN_TIMEOUT_S = 30.0

IDLE = EngineActivity(
    num_tokens=0,
    seconds=0.0,
    busy_seconds=0.0,
    mean_running=0.0,
    max_waiting=0,
    num_preemptions=0,
    max_kv_use=0.0,
)


class Engines(Dispatcher):
    """All engines of a run as one; a lost one comes back without the caller's doing.

    For one thread at a time; `check` and `weights_will_change` may be called by any.
    """

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        super().__init__(engines)
        # what a weight update asks of them: UpdatableEngines in weights/sync/parties.py
        self.call, self.gather = self._fleet.call, self._fleet.gather
        self.policy_version = 0
        self._config = engines[0].spec.config
        self._platform = engines[0].spec.platform

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
        wait: bool = True,
    ) -> Engines:
        """Start engines.

        Args:
            model: Hugging Face folder or Hub name.
            dtype: type of weights and activations.
            log_folder: where every engine writes its own log file.
            numbers: which of the cluster's engines these are; None: the first
                `config.num_engines`.
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
            for index in (range(config.num_engines) if numbers is None else numbers)
        ]
        engines = cls([RemoteEngine(spec, cluster.engine_options(spec.index)) for spec in specs])
        if wait:
            engines.wait_until_ready()
        return engines

    def wait_until_ready(self) -> None:
        """Wait until each engine has answered a request.

        Raises:
            InfraError: as for `start`.
        """
        engines = self._fleet.engines
        try:
            gather(
                [engine.awaited for engine in engines if engine.awaited is not None],
                names=[engine.name for engine in engines],
                doing="start",
                timeout_s=self._config.start_timeout_s,
                limit="rollout.start_timeout_s",
                describe_death=lambda index: describe_death(engines[index]),
            )
        except BaseException:
            self.shutdown()
            raise
        for engine in engines:
            engine.started()

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """One actor handle per engine."""
        return [engine.actor for engine in self._fleet.engines]

    def activity(self) -> list[EngineActivity]:
        """What each engine that is there did since the last call, by number."""
        with self._lock:
            activities = self._ask_all("activity", self._config.engine_progress_timeout_s)
        return [activities.get(engine.spec.index, IDLE) for engine in self._fleet.engines]

    def start_profile(self) -> None:
        """Let the engines that are there note what their ranks do."""
        with self._lock:
            self._ask_all("start_profile", self._config.start_timeout_s)

    def stop_profile(self) -> None:
        """Let them write it down: rollout/engine_spec.py:profile_folder."""
        with self._lock:
            self._ask_all("stop_profile", self._config.start_timeout_s)

    def clock(self, index: int) -> ClockReading:
        """What an engine reads off its node's clock."""
        refs = self.call("clock", {index: ()})
        reading: ClockReading = self.gather(
            refs, doing="clock", timeout_s=self._config.engine_progress_timeout_s
        )[index]
        return reading

    def take_notes(self) -> list[str]:
        """One line for every engine that was lost since the last call."""
        notes, self._fleet.notes = self._fleet.notes, []
        return notes

    def republish_with(self, republish: Callable[[int], object]) -> None:
        """Have `republish` give the present weights to an engine that took a lost one's place."""
        self._fleet.republish = republish

    def weights_will_change(self) -> None:
        """The trainer begins to work: it can give weights to nobody until it has ended."""
        self._fleet.weights_will_change()

    def weights_stay(self) -> None:
        """The trainer has ended, and still has the weights that these engines were given last."""
        self._fleet.weights_are_published()

    def updatable(self) -> list[int]:
        """Numbers of the engines that an update can reach now."""
        return [engine.spec.index for engine in self._fleet.present]

    def place(self, index: int) -> Place:
        """What changes when another process takes an engine's place."""
        return self._fleet.slots[index].place

    def gpus(self, index: int) -> tuple[str, ...]:
        """GPU numbers of an engine on its node; empty on a CPU."""
        return self._fleet.slots[index].spec.platform.gpus

    def finish_weight_update(
        self, indices: Sequence[int], policy_version: int, *, timeout_s: float
    ) -> None:
        """End an update: forget cached keys and values, and mark samples with the version."""
        method = "finish_weight_update"
        refs = self.call(method, {index: (policy_version,) for index in indices})
        for index in self.gather(refs, doing=method, timeout_s=timeout_s):
            self._fleet.slots[index].state = "serving"
        self.policy_version = policy_version
        self._fleet.weights_are_published()

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Leave the weights to the trainer, and GPU memory where engines share its GPUs.

        `keep_weights`: They wait in main memory for `wake`, and the trainer leaves them alone.
        """
        self.weights_will_change()
        if self._platform.sleeps:
            self._ask_all("sleep", self._config.start_timeout_s, keep_weights)
            for engine in self._fleet.present:
                engine.asleep = True

    def wake(self) -> None:
        """Take memory again, with the weights that were kept."""
        self.wake_weights()
        self.wake_cache()
        self.weights_stay()

    def wake_weights(self) -> None:
        """Take memory for the weights; they hold nothing until they are published."""
        self._wake("weights")

    def wake_cache(self) -> None:
        """Take memory for the key-value cache, after the weights are published."""
        self._wake("kv_cache")
        for engine in self._fleet.present:
            engine.asleep = False

    def shutdown(self) -> None:
        """End every engine and its processes, and wait until they are gone."""
        import ray
        from ray.exceptions import RayError

        engines = [engine for engine in self._fleet.engines if engine.state != "gone"]
        refs: list[ObjectRef[Any]] = [engine.actor.shutdown.remote() for engine in engines]
        for ref in refs:
            try:
                ray.get(ref, timeout=SHUTDOWN_TIMEOUT_S)
            except RayError:
                # dead or stuck: its reaper ends what it has left when the actor is killed
                continue
        for engine in engines:
            ray.kill(engine.actor)
        self._fleet.slots = {}

    def _ask_all(self, method: str, timeout_s: float, *arguments: object) -> dict[int, Any]:
        refs = self.call(method, {index: arguments for index in self.updatable()})
        return self.gather(refs, doing=method, timeout_s=timeout_s)

    def _wake(self, what: str) -> None:
        asleep = [engine.spec.index for engine in self._fleet.present if engine.asleep]
        refs = self.call("wake", {index: (what,) for index in asleep})
        self.gather(refs, doing="wake", timeout_s=self._config.start_timeout_s)
