"""Start-up of a run: every process and object of the loop, from the cluster to the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megadapo.cluster.calls import Watch
from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.data.pretraining import PretrainingStream
from megadapo.data.prompts import PromptStream
from megadapo.errors import DataError
from megadapo.rollout.journal.journal import VERSION, Journal
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.publish import Publisher
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.run.evaluations import Evaluations, ReservedEngine
from megadapo.run.inputs import (
    Phases,
    SamplingInputs,
    load_pretraining_data,
    load_tokenizer,
    start_cluster,
)
from megadapo.run.processes import (
    GpuSharing,
    at_start,
    elastic_engines,
    sends_while_training,
    start_environments,
    start_processes,
    start_trainer,
    trainer_settings,
)
from megadapo.run.replay import ReplayedRollouts, open_schedule
from megadapo.run.rollouts import SAMPLER_STATE, LiveRollouts, Rollouts, from_first_prompt
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.state.resume import samples_digest
from megadapo.run.state.status import StatusFile
from megadapo.run.step.probe import ParityProbe
from megadapo.run.step.training import PRETRAINING_STATE, StepTrainer
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import TrainerSettings
from megadapo.weights.config import SenderName

logger = logging.getLogger(__name__)


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
    repeated: Path | None = None,
    folder: Path | None = None,
    answers: Path | None = None,
    unfinished: Checkpoint | None = None,
    status: StatusFile | None = None,
) -> Iterator[Workers]:
    """Start trainer and engines at `checkpoint`, if there is one; end them on exit.

    Args:
        replay: folder of saved rollouts to use instead of engines.
        repeated: folder of a run whose schedule to repeat.
        folder: the run's folder, where sampled groups and results of an evaluation survive a kill;
            None: they are lost.
        answers: where results of an evaluation survive if not in `folder`.
        unfinished: an older checkpoint, to resume its evaluation; step 0: the first weights.
        status: receives the progress of trainer and engines, and the state of the engines; with
            it and `folder`, engines join and leave.
    """
    with ExitStack() as stack:
        # a resumed run needs the model's own weights only to finish evaluating them
        reads = checkpoint is None or (unfinished is not None and unfinished.step == 0)
        settings = replace(trainer_settings(config), reads_weights=reads)
        prompts = None
        if replay is None:
            inputs = SamplingInputs.start(config, phases, stack)
            prompts, tokenizer = inputs.stream(config), inputs.tokenizer
        else:
            tokenizer = load_tokenizer(config)
        texts = load_pretraining_data(config, phases, tokenizer)
        if checkpoint is not None:
            checkpoint = with_present_data(checkpoint, prompts, texts)
        if replay is None:
            workers = _start_live(
                *(config, settings, phases, stack, inputs, texts),
                *(folder, answers or folder, repeated, status),
            )
        else:
            first_step = 1 if checkpoint is None else checkpoint.step + 1
            rollouts = ReplayedRollouts(config, replay, first_step=first_step)
            workers = _start_replay(
                config, settings, phases, stack, rollouts, tokenizer, texts, status
            )
        if checkpoint is not None:
            with phases.phase("load checkpoint"):
                if unfinished is not None:
                    if unfinished.step > 0:
                        workers.trainer.ranks.load(unfinished.trainer_folder, unfinished.files)
                    # publishes these weights to the reserved engine before they are replaced
                    workers.rollouts.evaluate(unfinished.step)
                workers.trainer.load(checkpoint)
                workers.rollouts.load_state_dict(checkpoint.state)
        yield workers


def with_present_data(
    checkpoint: Checkpoint, prompts: PromptStream | None, texts: PretrainingStream | None
) -> Checkpoint:
    """Return a checkpoint whose state fits the data of the resumed run, before anything starts.

    If prompts or texts are others, the run starts with the first of them, or raises DataError if it
    does not accept them.
    """
    state, found = checkpoint.state, list[str]()
    sampler = state.get(SAMPLER_STATE)
    if prompts is not None and sampler is not None:
        difference = prompts.difference(sampler["cursor"]["prompts"])
        if difference:
            found.append(difference)
            state = from_first_prompt(state, prompts)
    saved = state.get(PRETRAINING_STATE)
    if texts is not None and saved is not None and (difference := texts.difference(saved)):
        found.append(difference)
        state = {name: state[name] for name in state if name != PRETRAINING_STATE}
    if found and not checkpoint.accepts_other_data:
        raise DataError(
            f"{'; '.join(found)}: resume with the same data, choose another run.folder, or add "
            "--accept-changes=data.train to continue with the first row of the present data"
        )
    for difference in found:
        logger.warning("%s: the run continues with the first of the present ones", difference)
    return replace(checkpoint, state=state)


def _start_live(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    inputs: SamplingInputs,
    pretraining_data: PretrainingStream | None,
    folder: Path | None,
    answers: Path | None,
    repeated: Path | None,
    status: StatusFile | None,
) -> Workers:
    first = at_start(config, folder)
    cluster = start_cluster(first, phases, stack, trains=True, num_engines=first.num_engines)
    watch = Watch()
    watch.add(cluster.daemons.check, during_updates=False)
    host = start_environments(
        config, phases, stack, log_folder=config.run.folder / LOGS_FOLDER, folder=folder
    )
    trainer, engines, reserved = start_processes(first, settings, phases, cluster, stack, watch)
    publisher = _publisher(config, trainer, engines)
    evaluations = Evaluations(
        config,
        engines,
        inputs,
        phases,
        fingerprint=publisher.fingerprint,
        folder=answers,
        reserved=_reserved_engine(config, trainer, reserved, watch),
    )
    stack.callback(evaluations.close)
    progress = _progress(status, trainer, engines, reserved)
    watch.add(trainer.check, engines.check, evaluations.check, progress)
    if host is not None:
        watch.add(host.check)
    if folder is not None and status is not None and config.cluster.placement == "separate":
        elastic = elastic_engines(config, cluster, engines, folder, status)
        watch.add(elastic.check)
        stack.callback(elastic.close)
    journal = None
    if folder is not None:
        journal = Journal(Group, folder / JOURNAL_FOLDER, samples_digest(config), name=VERSION)
        stack.callback(journal.close)
    schedule = open_schedule(config, folder, repeated)
    stack.callback(schedule.close)
    sampler: Sampler | BackgroundSampler
    sampler = inputs.sampler(config, evaluations.sampling_engines, journal, schedule, host)
    if config.sampling.overlaps:
        sampler = BackgroundSampler(sampler, config.run.num_steps)
    stack.callback(sampler.close)
    gpus = GpuSharing(trainer, engines, reserved, keeps_weights=config.weights.mode == "delta")
    rollouts = LiveRollouts(
        config=config,
        engines=engines,
        sampler=sampler,
        inputs=inputs,
        evaluations=evaluations,
        publisher=publisher,
        gpus=gpus,
        journal=journal,
        host=host,
    )
    probe = ParityProbe(config, engines)
    step_trainer = StepTrainer(trainer, gpus, config.algorithm, pretraining_data, probe)
    return Workers(trainer=step_trainer, rollouts=rollouts, tokenizer=inputs.tokenizer)


def _reserved_engine(
    config: RunConfig, trainer: Trainer, reserved: Engines | None, watch: Watch
) -> ReservedEngine | None:
    """Return the engine for held-out problems with its own publications; None without one."""
    if reserved is None:
        return None
    pinned = _publisher(config, trainer, reserved, sender="pinned")
    return ReservedEngine(engines=reserved, publish=pinned.publish, watch=watch)


def _start_replay(
    config: RunConfig,
    settings: TrainerSettings,
    phases: Phases,
    stack: ExitStack,
    rollouts: ReplayedRollouts,
    tokenizer: PreTrainedTokenizerBase,
    pretraining_data: PretrainingStream | None,
    status: StatusFile | None,
) -> Workers:
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=0)
    watch = Watch()
    watch.add(cluster.daemons.check, during_updates=False)
    trainer = start_trainer(config, settings, phases, cluster, stack, watch)
    watch.add(_progress(status, trainer))
    gpus = GpuSharing(trainer)
    step_trainer = StepTrainer(trainer, gpus, config.algorithm, pretraining_data)
    return Workers(trainer=step_trainer, rollouts=rollouts, tokenizer=tokenizer)


def _publisher(
    config: RunConfig, trainer: Trainer, engines: Engines, *, sender: SenderName = "live"
) -> Publisher:
    options: dict[str, Any] = {
        "tensor_parallel": config.rollout.tensor_parallel,
        "pipeline_parallel": config.rollout.pipeline_parallel,
        "expert_parallel": config.rollout.expert_parallel,
        "dtype": getattr(torch, config.model.dtype),
        "logs": trainer.logs,
    }
    republisher = None
    if sender == "live" and sends_while_training(config):
        # engines that join or restart need not wait for the next publication
        republisher = Publisher(
            trainer.ranks, engines, config.weights, sender="published", **options
        )
    return Publisher(
        trainer.ranks,
        engines,
        config.weights,
        sender=sender,
        republisher=republisher,
        deltas=_sends_deltas(config),
        **options,
    )


def _sends_deltas(config: RunConfig) -> bool:
    """Return whether an update may send only changed weights: engines must keep the others."""
    if config.weights.mode == "auto":
        has_16_bits = getattr(torch, config.model.dtype).itemsize == 2
        return has_16_bits and not config.cluster.engines_sleep
    return config.weights.mode == "delta"


def _progress(
    status: StatusFile | None, trainer: Trainer, *pools: Engines | None
) -> Callable[[], None]:
    def progress() -> None:
        if status is not None:
            num_tokens = sum(pool.num_tokens for pool in pools if pool is not None)
            status.report_progress(trainer.num_micro_batches, num_tokens)

    return progress
