"""The DAPO loop: one call per arrow of the data flow."""

from __future__ import annotations

from collections.abc import Collection, Generator
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import CorruptCheckpointError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.plan.forecast import core_warnings
from megadapo.run.evaluations import find_unfinished
from megadapo.run.fewer import fit_to_cluster
from megadapo.run.launch import Workers, start_workers
from megadapo.run.replay import check_replay, check_schedule
from megadapo.run.run import Run
from megadapo.run.step.record_writer import StepWriter
from megadapo.run.step.training import make_batch


def train(
    config: RunConfig,
    *,
    replay: Path | None = None,
    schedule: Path | None = None,
    accept_changes: Collection[str] = (),
    allow_fewer: bool = False,
) -> None:
    """Start or resume the run that `config` describes, and train to its last step.

    Args:
        replay: folder of saved rollouts to train on instead of sampling new ones.
        schedule: folder of a run to repeat, whose batches depended on the engines' speed.
        accept_changes: keys that a resumed run may change although they decide what it learns.
        allow_fewer: start with fewer data-parallel ranks and engines if nodes are missing.
    """
    warnings = [*config.warnings(), *core_warnings(config)]
    if replay is not None:
        warnings.append(check_replay(config, replay))
    if schedule is not None:
        warnings.append(check_schedule(config, schedule))
    recipe = config
    if allow_fewer:
        config, changes = fit_to_cluster(config)
        warnings += changes
    with Run.open(recipe, accept_changes=accept_changes) as run:
        run.log.show(*warnings)
        while not run.finished:
            try:
                _train_from_checkpoint(config, run, replay, schedule)
            except CorruptCheckpointError as error:
                run.fall_back(error)
    run.finish()


def _train_from_checkpoint(
    config: RunConfig, run: Run, replay: Path | None, schedule: Path | None
) -> None:
    """Start trainer and engines at the run's checkpoint, and do the remaining steps."""
    checkpoint, unfinished = run.checkpoints.current, None
    if replay is None:
        unfinished, warnings = find_unfinished(config, checkpoint)
        run.log.show(*warnings)
    with start_workers(
        config,
        run,
        checkpoint,
        replay=replay,
        repeated=schedule,
        folder=run.folder,
        unfinished=unfinished,
        status=run.log.status,
    ) as workers:
        for _ in training_steps(config, run, workers):
            pass


def training_steps(
    config: RunConfig, run: Run, workers: Workers
) -> Generator[MetricRecord, None, None]:
    """Yield the record of each remaining step; a step runs when its record is requested."""
    trainer, rollouts = workers.trainer, workers.rollouts
    writer = StepWriter(config, run, workers)
    with writer.saving_last_step():
        with run.phase("publish weights"):
            rollouts.publish(policy_version=run.step)
        writer.evaluate(run.step)
        for step in run.steps():
            with run.phase("rollout", interruptible=True):
                sampled = rollouts.next_batch()  # generate, score, select
            with run.phase("train"):
                # shaped rewards, advantages, loss weights, packing
                batch, advantages = make_batch(sampled, config, policy_version=step - 1)
                checks = run.checks_first_ratio(step)
                update = trainer.update(batch, step, checks_first_ratio=checks)
            writer.save_rollouts(step, sampled, batch, advantages, update)
            with run.phase("rollout"):
                rollouts.stop_sampling()
                rollouts.finish_evaluations()
            with run.phase("train"):
                update = trainer.finish_probe(update)
            with run.phase("sync"):
                published = rollouts.publish(policy_version=step)
            writer.evaluate(step)
            # metrics, oracles, checkpoint
            yield writer.finish_step(step, sampled, update, published)
        run.log.show(*rollouts.closing_messages())
