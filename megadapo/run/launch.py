"""The parts of a run, started, put together and ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from megadapo.algorithm.kl_control import KlController
from megadapo.config import RunConfig
from megadapo.data.texts import TextStream
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.journal.repeated_steps import RepeatedSteps
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.ahead import AheadSampler
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.run.evaluations import Evaluations, ReservedEngine, UnfinishedEvaluation
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.processes import start_processes, start_trainer, trainer_settings
from megadapo.run.replay import ReplayedRollouts
from megadapo.run.rollouts import LiveRollouts, Rollouts
from megadapo.run.sampling import (
    Phases,
    Questions,
    load_texts,
    load_tokenizer,
    start_cluster,
)
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.state.drift import samples_digest
from megadapo.run.workers import Workers
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings
from megadapo.weights.sync.publish import Publisher


class GetsOn(Protocol):
    """Takes note of how far the processes are."""

    def __call__(self, *, micro_batches: int, tokens: int) -> None: ...


@contextmanager
def start_workers(
    config: RunConfig,
    phases: Phases,
    checkpoint: Checkpoint | None,
    *,
    replay: Path | None = None,
    folder: Path | None = None,
    unfinished: UnfinishedEvaluation | None = None,
    gets_on: GetsOn | None = None,
) -> Iterator[Workers]:
    """Start every part, at `checkpoint` where there is one; all have ended when this returns.

    Args:
        replay: folder of saved rollouts that take the place of engines.
        folder: the run's, where groups and the answers of an evaluation under way are kept, so that
            neither is asked for again after a stop; None: they are not kept.
        unfinished: an evaluation of weights before the checkpoint's, to be gone on with.
        gets_on: is told every few seconds how far trainer and engines are.

    Raises:
        ConfigError: steps to be replayed are not saved.
        DataError: prompts, gold answers or the tokenizer cannot be used.
        InfraError: a process did not start.
        CheckpointError: the checkpoint is not of this model.
        CorruptCheckpointError: a file of it is not what was written.
    """
    with ExitStack() as stack:
        # a run that goes on has no use for the weights it began with, but to evaluate them
        reads = checkpoint is None or (unfinished is not None and not unfinished.trainer_folder)
        settings = replace(trainer_settings(config), reads_weights=reads)
        if replay is None:
            workers = _start_live(config, settings, phases, stack, folder, gets_on)
        else:
            first_step = 1 if checkpoint is None else checkpoint.step + 1
            rollouts = ReplayedRollouts(config, replay, first_step=first_step)
            workers = _start_replay(config, settings, phases, stack, rollouts, gets_on)
        if checkpoint is not None:
            with phases.phase("load checkpoint"):
                if unfinished is not None:
                    _resume(unfinished, workers)
                workers.trainer.load(checkpoint.trainer_folder, checkpoint.files)
                workers.load_state_dict(checkpoint.state)
        yield workers


def _resume(unfinished: UnfinishedEvaluation, workers: Workers) -> None:
    """Let the trainer take the weights of an earlier step, for as long as they are published."""
    if unfinished.trainer_folder is not None:
        workers.trainer.load(unfinished.trainer_folder, unfinished.files)
    workers.rollouts.evaluate(unfinished.step)


def _start_live(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    folder: Path | None,
    gets_on: GetsOn | None,
) -> Workers:
    questions = Questions.start(config, phases, stack)
    texts = load_texts(config, phases, questions.tokenizer)
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=config.num_engines)
    trainer, engines, held_out = start_processes(config, settings, phases, cluster, stack)
    publisher = _publisher(config, trainer, engines)
    engines.republish_with(publisher.republish)
    evaluations = Evaluations(
        config,
        engines,
        questions,
        phases,
        fingerprint=publisher.fingerprint,
        folder=folder,
        reserved=None if held_out is None else _reserved(config, trainer, engines, held_out),
    )
    stack.callback(evaluations.close)
    progress = _progress(gets_on, trainer, engines)
    engines.watch = _each(trainer.check, evaluations.check, cluster.control.look, progress)
    trainer.watch = _each(engines.check, evaluations.check, cluster.control.look, progress)
    journal = None
    if folder is not None and config.sampling.journal:
        journal = Journal(folder, samples_digest(config), fsync=config.sampling.journal_fsync)
        stack.callback(journal.close)
    sampler = questions.sampler(config, evaluations.sampling_engines, journal)
    source: Sampler | RepeatedSteps = sampler
    if journal is not None and config.sampling.follows_speed:
        source = RepeatedSteps(sampler, journal, config.sampling)
    ahead = config.sampling.mode == "one_step_off"
    gpus = GpuSharing(trainer, engines, held_out)
    rollouts = LiveRollouts(
        config=config,
        engines=engines,
        sampler=AheadSampler(source, engines, config.run.num_steps) if ahead else source,
        questions=questions,
        evaluations=evaluations,
        publisher=publisher,
        gpus=gpus,
        journal=journal,
    )
    return _workers(config, trainer, gpus, rollouts, questions.tokenizer, texts)


def _start_replay(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    rollouts: ReplayedRollouts,
    gets_on: GetsOn | None,
) -> Workers:
    tokenizer = load_tokenizer(config)
    texts = load_texts(config, phases, tokenizer)
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=0)
    trainer = start_trainer(settings, phases, cluster, stack, config.run.folder)
    trainer.watch = _each(cluster.control.look, _progress(gets_on, trainer))
    return _workers(config, trainer, GpuSharing(trainer), rollouts, tokenizer, texts)


def _workers(
    config: RunConfig,
    trainer: Trainer,
    gpus: GpuSharing,
    rollouts: Rollouts,
    tokenizer: PreTrainedTokenizerBase,
    texts: TextStream | None,
) -> Workers:
    algorithm = config.algorithm
    return Workers(
        trainer=trainer,
        rollouts=rollouts,
        tokenizer=tokenizer,
        kl_controller=KlController(algorithm.kl_control, algorithm.objective.kl_reward_coef),
        gpus=gpus,
        pretraining=algorithm.pretraining,
        texts=texts,
    )


def _publisher(
    config: RunConfig, trainer: Trainer, engines: Engines, *, held: bool = False
) -> Publisher:
    return Publisher(
        trainer.ranks,
        engines,
        config.weights,
        tensor_parallel=config.rollout.tensor_parallel,
        pipeline_parallel=config.rollout.pipeline_parallel,
        expert_parallel=config.rollout.expert_parallel,
        dtype=getattr(torch, config.model.dtype),
        held=held,
        deltas=_sends_changes(config),
        logs=trainer.processes.logs,
    )


def _sends_changes(config: RunConfig) -> bool:
    """Whether engines may be sent only what changed, as they have kept the rest."""
    if config.weights.mode == "auto":
        has_16_bits = getattr(torch, config.model.dtype).itemsize == 2
        forget = config.cluster.engines_sleep and config.rollout.sleep_level == 2
        return has_16_bits and not forget
    return config.weights.mode == "delta"


def _reserved(
    config: RunConfig, trainer: Trainer, engines: Engines, held_out: Engines
) -> ReservedEngine:
    """The engine of the held-out problems, whose weights the trainer's ranks hold for it."""
    publisher = _publisher(config, trainer, held_out, held=True)

    def publish(policy_version: int) -> None:
        publisher.hold()
        held_out.republish_with(publisher.republish)
        publisher.publish(policy_version)

    return ReservedEngine(
        engines=held_out, publish=publish, watch=_each(trainer.check, engines.check)
    )


def _progress(
    gets_on: GetsOn | None, trainer: Trainer, engines: Engines | None = None
) -> Callable[[], None]:
    """What tells `gets_on` how far they are."""

    def progress() -> None:
        if gets_on is not None:
            tokens = 0 if engines is None else engines.num_tokens
            gets_on(micro_batches=trainer.processes.num_pieces, tokens=tokens)

    return progress


def _each(*checks: Callable[[], None]) -> Callable[[], None]:
    """All of the checks as one."""

    def check() -> None:
        for one in checks:
            one()

    return check
