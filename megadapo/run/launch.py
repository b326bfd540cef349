"""Start-up of a run: every process and object of the loop, from the cluster to the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from megadapo.cluster.calls import Watch
from megadapo.config import RunConfig
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.ahead import AheadSampler
from megadapo.run.evaluations import Evaluations, ReservedEngine, UnfinishedEvaluation
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.inputs import (
    Phases,
    SamplingInputs,
    load_pretraining_data,
    load_tokenizer,
    start_cluster,
)
from megadapo.run.processes import start_processes, start_trainer, trainer_settings
from megadapo.run.replay import ReplayedRollouts
from megadapo.run.rollouts import LiveRollouts, Rollouts
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.state.config_diff import samples_digest
from megadapo.run.step.training import StepTrainer
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings
from megadapo.weights.sync.publish import Publisher

OnProgress = Callable[[int, int], None]
"""Receives micro-batches computed and tokens generated, every few seconds."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The trainer and the rollouts, as the loop uses them."""

    trainer: StepTrainer
    rollouts: Rollouts
    tokenizer: PreTrainedTokenizerBase


@contextmanager
def start_workers(
    config: RunConfig,
    phases: Phases,
    checkpoint: Checkpoint | None,
    *,
    replay: Path | None = None,
    folder: Path | None = None,
    unfinished: UnfinishedEvaluation | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[Workers]:
    """Start trainer and engines at `checkpoint`, if there is one; end them on exit.

    Args:
        replay: folder of saved rollouts to use instead of engines.
        folder: the run's folder, where sampled groups and results of an evaluation survive a kill;
            None: they are lost.
        unfinished: an evaluation of weights older than the checkpoint's, to resume.
        on_progress: called every few seconds while trainer or engines work.

    Raises:
        ConfigError: steps to replay are not saved.
        DataError: prompts, gold answers or the tokenizer cannot be used.
        InfraError: a process did not start.
        CheckpointError: the checkpoint belongs to another model.
        CorruptCheckpointError: a file of the checkpoint is damaged.
    """
    with ExitStack() as stack:
        # a resumed run needs the model's own weights only to finish evaluating them
        reads = checkpoint is None or (unfinished is not None and not unfinished.trainer_folder)
        settings = replace(trainer_settings(config), reads_weights=reads)
        if replay is None:
            workers = _start_live(config, settings, phases, stack, folder, on_progress)
        else:
            first_step = 1 if checkpoint is None else checkpoint.step + 1
            rollouts = ReplayedRollouts(config, replay, first_step=first_step)
            workers = _start_replay(config, settings, phases, stack, rollouts, on_progress)
        if checkpoint is not None:
            with phases.phase("load checkpoint"):
                if unfinished is not None:
                    if unfinished.trainer_folder is not None:
                        workers.trainer.ranks.load(unfinished.trainer_folder, unfinished.files)
                    # publishes these weights to the reserved engine before they are replaced
                    workers.rollouts.evaluate(unfinished.step)
                workers.trainer.load(checkpoint)
                workers.rollouts.load_state_dict(checkpoint.state)
        yield workers


def _start_live(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    folder: Path | None,
    on_progress: OnProgress | None,
) -> Workers:
    inputs = SamplingInputs.start(config, phases, stack)
    pretraining_data = load_pretraining_data(config, phases, inputs.tokenizer)
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=config.num_engines)
    watch = Watch()
    trainer, engines, reserved = start_processes(config, settings, phases, cluster, stack, watch)
    publisher = _publisher(config, trainer, engines)
    reserved_engine = None
    if reserved is not None:
        pinned = _publisher(config, trainer, reserved, pinned=True)
        reserved_engine = ReservedEngine(engines=reserved, publish=pinned.publish, watch=watch)
    evaluations = Evaluations(
        config,
        engines,
        inputs,
        phases,
        fingerprint=publisher.fingerprint,
        folder=folder,
        reserved=reserved_engine,
    )
    stack.callback(evaluations.close)
    progress = _progress(on_progress, trainer, engines, reserved)
    watch.add(trainer.check, engines.check, evaluations.check, cluster.daemons.check, progress)
    journal = None
    if folder is not None:
        journal = Journal(folder, samples_digest(config))
        stack.callback(journal.close)
    sampler = inputs.sampler(config, evaluations.sampling_engines, journal)
    ahead = config.sampling.mode == "one_step_off"
    gpus = GpuSharing(trainer, engines, reserved, keeps_weights=config.weights.mode == "delta")
    rollouts = LiveRollouts(
        config=config,
        engines=engines,
        sampler=AheadSampler(sampler, engines, config.run.num_steps) if ahead else sampler,
        inputs=inputs,
        evaluations=evaluations,
        publisher=publisher,
        gpus=gpus,
        journal=journal,
    )
    step_trainer = StepTrainer(trainer, gpus, config.algorithm, pretraining_data)
    return Workers(trainer=step_trainer, rollouts=rollouts, tokenizer=inputs.tokenizer)


def _start_replay(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    rollouts: ReplayedRollouts,
    on_progress: OnProgress | None,
) -> Workers:
    tokenizer = load_tokenizer(config)
    pretraining_data = load_pretraining_data(config, phases, tokenizer)
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=0)
    watch = Watch()
    trainer = start_trainer(config, settings, phases, cluster, stack, watch)
    watch.add(cluster.daemons.check, _progress(on_progress, trainer))
    gpus = GpuSharing(trainer)
    step_trainer = StepTrainer(trainer, gpus, config.algorithm, pretraining_data)
    return Workers(trainer=step_trainer, rollouts=rollouts, tokenizer=tokenizer)


def _publisher(
    config: RunConfig, trainer: Trainer, engines: Engines, *, pinned: bool = False
) -> Publisher:
    return Publisher(
        trainer.ranks,
        engines,
        config.weights,
        tensor_parallel=config.rollout.tensor_parallel,
        pipeline_parallel=config.rollout.pipeline_parallel,
        expert_parallel=config.rollout.expert_parallel,
        dtype=getattr(torch, config.model.dtype),
        pinned=pinned,
        deltas=_sends_deltas(config),
        logs=trainer.logs,
    )


def _sends_deltas(config: RunConfig) -> bool:
    """Return whether an update may send only changed weights: engines must keep the others."""
    if config.weights.mode == "auto":
        has_16_bits = getattr(torch, config.model.dtype).itemsize == 2
        return has_16_bits and not config.cluster.engines_sleep
    return config.weights.mode == "delta"


def _progress(
    on_progress: OnProgress | None, trainer: Trainer, *pools: Engines | None
) -> Callable[[], None]:
    def progress() -> None:
        if on_progress is not None:
            num_tokens = sum(pool.num_tokens for pool in pools if pool is not None)
            on_progress(trainer.num_micro_batches, num_tokens)

    return progress
