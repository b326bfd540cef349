"""The processes of a run, trainer and engines, started in the order their memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megadapo.cluster.cluster import Cluster
from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig
from megadapo.models.folder import path_from_anywhere
from megadapo.rollout.pool.engines import Engines
from megadapo.run.sampling import Phases
from megadapo.trainer.config import OffloadConfig
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings


def start_processes(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    cluster: Cluster,
    stack: ExitStack,
) -> tuple[Trainer, Engines, Engines | None]:
    """Start engines and trainer, at once unless they share GPUs; they end with `stack`.

    Returns:
        The trainer, the engines it trains with, and what there is for held-out problems only.

    Raises:
        InfraError: a process did not start.
    """
    # an engine measures the free memory of its GPU, so it must be alone on it while it starts
    one_by_one = config.cluster.engines_sleep
    with phases.phase("start engines"):
        first, num_engines = config.rollout.num_engines, config.num_engines
        engines = _start_engines(
            config,
            cluster,
            stack,
            range(first),
            returns_experts=config.trainer.router_replay,
            wait=one_by_one,
        )
        held_out = None
        if num_engines > first:
            held_out = _start_engines(config, cluster, stack, range(first, num_engines), wait=False)
        if one_by_one:
            engines.sleep()
    trainer = start_trainer(settings, phases, cluster, stack, config.run.folder)
    with phases.phase("wait for engines"):
        if not one_by_one:
            engines.wait_until_ready()
        if held_out is not None:
            held_out.wait_until_ready()
    return trainer, engines, held_out


def _start_engines(
    config: RunConfig,
    cluster: Cluster,
    stack: ExitStack,
    numbers: Sequence[int],
    *,
    returns_experts: bool = False,
    wait: bool,
) -> Engines:
    engines = Engines.start(
        config.rollout,
        cluster,
        model=path_from_anywhere(config.model.path),
        dtype=config.model.dtype,
        max_prompt_tokens=config.data.max_prompt_tokens,
        log_folder=config.run.folder / LOGS_FOLDER,
        numbers=numbers,
        shares_gpus=config.cluster.placement == "colocated",
        returns_experts=returns_experts,
        wait=wait,
    )
    stack.callback(engines.shutdown)
    return engines


def start_trainer(
    settings: TrainerSettings, phases: Phases, cluster: Cluster, stack: ExitStack, folder: Path
) -> Trainer:
    """Start the trainer of the run in `folder`; it ends with `stack`.

    Raises:
        InfraError: a rank did not start.
    """
    with phases.phase("start trainer"):
        trainer = Trainer.start(settings, cluster, log_folder=folder / LOGS_FOLDER)
        stack.callback(trainer.shutdown)
    return trainer


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """What the trainer's ranks need to know of a run."""
    trainer = config.trainer
    if config.cluster.placement == "separate":
        # nobody else would use the memory
        trainer = trainer.model_copy(update={"offload": OffloadConfig()})
    critic = config.critic
    if critic.path is not None:
        critic = critic.model_copy(update={"path": path_from_anywhere(critic.path)})
    path = path_from_anywhere(config.model.path)
    return TrainerSettings(
        model=config.model.model_copy(update={"path": path}),
        trainer=trainer,
        objective=config.algorithm.objective,
        bapo=config.algorithm.bapo,
        importance=config.algorithm.importance,
        reference=config.algorithm.reference,
        advantage=config.algorithm.advantage,
        normalize_by_std=config.algorithm.normalize_by_std,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        critic=critic if config.algorithm.advantage == "gae" else None,
        discount=config.algorithm.discount,
        gae_lambda=config.algorithm.gae_lambda,
    )
