"""The start of a run's processes: trainer and engines, in the order that their memory allows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megadapo.cluster.calls import Watch
from megadapo.cluster.cluster import Cluster
from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig
from megadapo.models.folder import path_from_anywhere
from megadapo.rollout.pool.engines import Engines
from megadapo.run.inputs import Phases, start_cluster
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings


def start_processes(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    cluster: Cluster,
    stack: ExitStack,
    watch: Watch,
) -> tuple[Trainer, Engines, Engines | None]:
    """Start engines and trainer, at once unless they share GPUs; end them with `stack`.

    Returns:
        The trainer, the engines for rollouts, and the engine reserved for held-out problems.

    Raises:
        InfraError: a process did not start.
    """
    # an engine measures the free memory of its GPU, so it must start alone (run/gpu_sharing.py)
    one_by_one = config.cluster.engines_sleep
    options = {
        "log_folder": config.run.folder / LOGS_FOLDER,
        "shares_gpus": config.cluster.placement == "colocated",
    }
    first, last = config.rollout.num_engines, config.num_engines
    with phases.phase("start engines"):
        engines = _start_engines(
            config,
            cluster,
            stack,
            numbers=range(first),
            returns_experts=config.trainer.router_replay,
            watch=watch,
            **options,
        )
        reserved = None
        if last > first:
            reserved = _start_engines(config, cluster, stack, numbers=range(first, last), **options)
        if one_by_one:
            engines.wait_until_ready()
            engines.sleep()
    trainer = start_trainer(config, settings, phases, cluster, stack, watch)
    with phases.phase("wait for engines"):
        if not one_by_one:
            engines.wait_until_ready()
        if reserved is not None:
            reserved.wait_until_ready()
    return trainer, engines, reserved


def start_engines_alone(
    config: RunConfig, phases: Phases, stack: ExitStack, *, log_folder: Path
) -> Engines:
    """Start engines with the weights of model.path and without a trainer; end them with `stack`.

    Raises:
        InfraError: the cluster lacks slots, or an engine did not start.
    """
    num_engines = config.rollout.num_engines
    cluster = start_cluster(
        config, phases, stack, trains=False, num_engines=num_engines, folder=log_folder
    )
    with phases.phase("start engines"):
        engines = _start_engines(
            config,
            cluster,
            stack,
            log_folder=log_folder,
            weights_from="folder",
            shares_gpus=False,
            returns_experts=config.trainer.router_replay,
        )
        engines.wait_until_ready()
    return engines


def _start_engines(
    config: RunConfig, cluster: Cluster, stack: ExitStack, **options: Any
) -> Engines:
    engines = Engines.start(
        config.rollout,
        cluster,
        model=path_from_anywhere(config.model.path),
        dtype=config.model.dtype,
        max_prompt_tokens=config.data.max_prompt_tokens,
        start_timeout_s=config.cluster.start_timeout_s,
        **options,
    )
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
    """Start the trainer of a run; end it with `stack`.

    Raises:
        InfraError: a rank did not start.
    """
    with phases.phase("start trainer"):
        trainer = Trainer.start(
            settings,
            cluster,
            log_folder=config.run.folder / LOGS_FOLDER,
            start_timeout_s=config.cluster.start_timeout_s,
            watch=watch,
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
