"""The start of a run's processes: trainer and engines, in the order that their memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megadapo.cluster.calls import Watch
from megadapo.cluster.cluster import Cluster
from megadapo.cluster.process_log import LOGS_FOLDER, engine_log
from megadapo.config import RunConfig
from megadapo.errors import DataError
from megadapo.models.folder import path_from_anywhere
from megadapo.rollout.engine.spec import EngineSpec
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.pool.elastic import ElasticEngines
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.pool.request import read_request
from megadapo.run.inputs import Phases, start_cluster
from megadapo.run.state.status import StatusFile
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings
from megadapo.weights.disk.headers import INDEX_NAME, WHOLE_NAME


class GpuSharing:
    """The order in which the trainer and the engines use shared memory.

    `reserved`: an engine for held-out problems on a GPU of its own, which never sleeps.
    `keeps_weights`: whether engines keep their weights in main memory during updates.
    """

    def __init__(
        self,
        trainer: Trainer,
        engines: Engines | None = None,
        reserved: Engines | None = None,
        *,
        keeps_weights: bool = False,
    ) -> None:
        self._trainer, self._engines, self._keeps_weights = trainer, engines, keeps_weights
        self._all = [one for one in (engines, reserved) if one is not None]
        self._shares = engines is not None and engines.shares_gpus

    def start_update(self) -> None:
        """Leave the weights and the GPU memory to the trainer until `publishing`."""
        for engines in self._all:
            engines.on_update_start()
        if self._engines is not None and self._shares:
            self._engines.sleep(keep_weights=self._keeps_weights)
            self._trainer.take_gpus()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Wake the engines around a block that publishes the trainer's weights."""
        assert self._engines is not None, "a replay has no engines"
        self._engines.wake_weights()
        yield
        if self._shares:
            # the key-value cache takes the memory that the trainer frees
            self._trainer.leave_to_engines()
        self._engines.wake_cache()
        for engines in self._all:
            engines.on_update_done()


def start_processes(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    cluster: Cluster,
    stack: ExitStack,
    watch: Watch,
) -> tuple[Trainer, Engines, Engines | None]:
    """Start engines and trainer, at once unless they share GPUs; end them with `stack`.

    Return the trainer, the engines for rollouts, and the engine reserved for held-out problems.
    """
    # an engine measures the free memory of its GPU, so it must start alone
    one_by_one = config.cluster.engines_sleep
    options: dict[str, Any] = {
        "log_folder": config.run.folder / LOGS_FOLDER,
        "weights_from": "trainer",
        "shares_gpus": config.cluster.placement == "colocated",
    }
    first, last = config.rollout.num_engines, config.num_engines
    with phases.phase("start engines"):
        engines = start_engines(
            config,
            cluster,
            stack,
            numbers=range(_num_at_once(config)),
            returns_experts=config.trainer.router_replay,
            watch=watch,
            **options,
        )
        reserved = None
        if last > first:
            reserved = start_engines(config, cluster, stack, numbers=range(first, last), **options)
        if one_by_one:
            engines.wait_until_ready()
            engines.sleep()
    settings = replace(settings, shares_gpu=one_by_one)
    trainer = start_trainer(config, settings, phases, cluster, stack, watch)
    with phases.phase("wait for engines"):
        if not one_by_one:
            engines.wait_until_ready()
        if reserved is not None:
            reserved.wait_until_ready()
    _start_others(config, cluster, engines)
    return trainer, engines, reserved


def _num_at_once(config: RunConfig) -> int:
    """Return the number of engines that a run waits for.

    It is one where all share the cores of this machine: the imports of several would end later.
    """
    cluster = config.cluster
    own = cluster.uses_cuda or cluster.placement == "separate" or cluster.address is not None
    return config.rollout.num_engines if own else 1


def _start_others(config: RunConfig, cluster: Cluster, engines: Engines) -> None:
    """Start the engines that the run does not wait for; they join its first rollouts."""
    for number in range(_num_at_once(config), config.rollout.num_engines):
        engines.join(number, cluster.engine_gpus(number), cluster.engine_options(number))


def elastic_engines(
    config: RunConfig, cluster: Cluster, engines: Engines, folder: Path, status: StatusFile
) -> ElasticEngines:
    """Return what lets engines join and leave the pool as the file in the run's folder asks."""
    return ElasticEngines(
        engines,
        cluster,
        folder,
        driver=status.current.driver,
        num_engines=config.rollout.num_engines,
        num_ranks=config.rollout.ranks_per_engine,
        next_number=config.num_engines,
        report=status.report_engines,
    )


def at_start(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the configuration with the engines to start with: the recipe's, or fewer if the run's
    folder asks for fewer.

    More engines join later, so a start never waits for more slots than the recipe needs.
    """
    request = None
    if folder is not None and config.cluster.placement == "separate":
        with suppress(DataError):  # `ElasticEngines` reports it
            request = read_request(folder)
    num_engines = config.rollout.num_engines
    if request is None or request.num_engines >= num_engines:
        return config
    rollout = config.rollout.model_copy(update={"num_engines": request.num_engines})
    return config.model_copy(update={"rollout": rollout})


def sends_while_training(config: RunConfig) -> bool:
    """Return whether engines that join or restart get their weights also during an update.

    Engines generate then all the time. In other modes they wait for the publication after the
    update, which costs less than a copy of the weights in main memory.
    """
    mode: str = config.sampling.mode
    return mode == "async"


def start_environments(
    config: RunConfig,
    phases: Phases,
    stack: ExitStack,
    *,
    log_folder: Path,
    folder: Path | None = None,
) -> EpisodeHostActor | None:
    """Start the host of the environments, before the engines ask for it; end it with `stack`.

    `folder`: the run's folder, where actions and observations survive a kill.
    """
    if not config.rollout.environments:
        return None
    with phases.phase("start environments"):
        host = EpisodeHostActor(
            config.rollout.environments,
            folder=folder,
            log_folder=log_folder,
            timeout_s=config.cluster.start_timeout_s,
        )
    stack.callback(host.close)
    return host


def start_engines_alone(
    config: RunConfig,
    phases: Phases,
    stack: ExitStack,
    *,
    log_folder: Path,
    folder: Path | None = None,
) -> tuple[Engines, EpisodeHostActor | None]:
    """Start engines with the weights of model.path and without a trainer; end them with `stack`.

    Return the engines, and the host of the environments if there are any. `folder`: as in
    `start_environments`.
    """
    model, num_engines = Path(config.model.path), config.rollout.num_engines
    if (model / WHOLE_NAME).exists() and (model / INDEX_NAME).exists():
        raise DataError(
            f"model.path = {model} has {WHOLE_NAME}, which a run trains, and {INDEX_NAME}, whose "
            "files vLLM would read here: delete one of them"
        )
    cluster = start_cluster(
        config, phases, stack, trains=False, num_engines=num_engines, folder=log_folder
    )
    host = start_environments(config, phases, stack, log_folder=log_folder, folder=folder)
    with phases.phase("start engines"):
        engines = start_engines(
            config,
            cluster,
            stack,
            numbers=range(_num_at_once(config)),
            log_folder=log_folder,
            weights_from="folder",
            shares_gpus=False,
            returns_experts=config.trainer.router_replay,
        )
        engines.wait_until_ready()
    _start_others(config, cluster, engines)
    return engines, host


def start_engines(
    config: RunConfig,
    cluster: Cluster,
    stack: ExitStack,
    *,
    numbers: Sequence[int],
    log_folder: Path,
    watch: Watch | None = None,
    **settings: Any,
) -> Engines:
    """Start engines; end them with `stack`. `settings`: further fields of `EngineSpec`."""
    spec = EngineSpec(
        index=0,
        model=path_from_anywhere(config.model.path),
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        config=config.rollout,
        gpus=(),
        log_file=engine_log(log_folder.resolve(), 0),
        start_timeout_s=config.cluster.start_timeout_s,
        **settings,
    )
    specs = [spec.at(number, cluster.engine_gpus(number)) for number in numbers]
    handles = [EngineHandle(one, cluster.engine_options(one.index)) for one in specs]
    engines = Engines(handles, watch)
    stack.callback(engines.shutdown)
    return engines


def start_trainer(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    cluster: Cluster,
    stack: ExitStack,
    watch: Watch,
) -> Trainer:
    """Start the trainer of a run; end it with `stack`."""
    with phases.phase("start trainer"):
        trainer = Trainer(
            settings,
            cluster,
            log_folder=config.run.folder / LOGS_FOLDER,
            start_timeout_s=config.cluster.start_timeout_s,
            watch=watch,
            sends_while_training=sends_while_training(config),
        )
        stack.callback(trainer.shutdown)
    return trainer


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """Return the settings of the trainer's ranks."""
    trainer = config.trainer
    if config.cluster.placement == "separate":
        # no engine would use the freed memory
        trainer = trainer.model_copy(update={"offload": ()})
    critic = config.critic
    if critic.path is not None:
        critic = critic.model_copy(update={"path": path_from_anywhere(critic.path)})
    algorithm, reference = config.algorithm, config.algorithm.reference
    if reference.path is not None:
        reference = reference.model_copy(update={"path": path_from_anywhere(reference.path)})
        algorithm = algorithm.model_copy(update={"reference": reference})
    path = path_from_anywhere(config.model.path)
    return TrainerSettings(
        model=config.model.model_copy(update={"path": path}),
        trainer=trainer,
        algorithm=algorithm,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        critic=critic if config.algorithm.advantage == "gae" else None,
    )
