"""The DAPO loop: one call per arrow of the data flow."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path

from megadapo.algorithm.advantages import advantages, response_rewards
from megadapo.algorithm.branches import branch_advantages
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.config import RunConfig
from megadapo.data.batch import pack
from megadapo.errors import CorruptCheckpointError, MegadapoError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.oracles import check_oracles
from megadapo.observe.summary import RunSummary
from megadapo.run.evaluations import find_unfinished
from megadapo.run.launch import start_workers
from megadapo.run.replay import check_replay
from megadapo.run.run import Run
from megadapo.run.state.way_out import FinalSave
from megadapo.run.step_metrics import step_metrics, step_notes
from megadapo.run.step_rollouts import saved_groups, saved_sequences
from megadapo.run.workers import Workers


def train(
    config: RunConfig, *, replay: Path | None = None, accept_changes: bool = False
) -> RunSummary:
    """Run, or go on with, the training that `config` describes, to its last step.

    Args:
        replay: folder of saved rollouts that are trained on in the place of new ones.
        accept_changes: whether a run that stands may go on learning something else.

    Raises:
        RunInterruptedError: it was asked to stop; every completed step is saved.
        OracleError: a step broke an invariant; it is saved, as every step before it.
        MegadapoError: whatever else ended it early; every completed step is saved, unless the
            trainer itself was lost.
    """
    notes = [] if replay is None else [check_replay(config, replay)]
    with Run.open(config, accept_changes=accept_changes) as run:
        run.log.note(*notes)
        while not run.finished:
            try:
                _train(config, run, replay)
            except CorruptCheckpointError as error:
                run.fall_back(error)
    return run.finish()


def _train(config: RunConfig, run: Run, replay: Path | None) -> None:
    """Start everything that trains, and do the steps that are still to do.

    Raises:
        CorruptCheckpointError: a process that loads the checkpoint found it damaged.
    """
    unfinished = None
    if replay is None:
        unfinished, notes = find_unfinished(config, run.checkpoints.current)
        run.log.note(*notes)
    with start_workers(
        config,
        run,
        run.checkpoints.current,
        replay=replay,
        folder=run.folder,
        unfinished=unfinished,
        gets_on=run.log.status.gets_on,
    ) as workers:
        for _ in training_steps(config, run, workers):
            pass


def training_steps(
    config: RunConfig, run: Run, workers: Workers
) -> Generator[MetricRecord, None, None]:
    """Yield the record of each step that is still to do; a step is taken when it is asked for.

    Raises:
        RunInterruptedError: it was asked to stop; every completed step is saved.
        OracleError: a step broke an invariant; it is saved, as every step before it.
    """
    with run.phase("publish weights"):
        workers.rollouts.publish(policy_version=run.step)
    _evaluate(run, workers, run.step)
    ends = FinalSave(run, workers)
    try:
        for step in run.steps():
            with run.phase("rollout", interruptible=True):
                sampled = workers.rollouts.next_batch()
            with run.phase("train"), ends.trainer_changes():
                of_responses = advantages(
                    sampled.groups,
                    config.algorithm,
                    max_response_tokens=config.rollout.max_response_tokens,
                )
                values = branch_advantages(sampled.groups, of_responses, config.algorithm)
                batch = pack(
                    sampled.groups,
                    values,
                    loss_weights(sampled.groups, config.algorithm),
                    mini_batch_size=config.algorithm.responses_per_mini_batch,
                    rewards=response_rewards(
                        sampled.groups,
                        config.algorithm,
                        max_response_tokens=config.rollout.max_response_tokens,
                    ),
                )
                update = workers.update(batch, step, record=saved_sequences(sampled))
            saved = saved_groups(
                step,
                sampled,
                values,
                update,
                config,
                workers.tokenizer,
                workers.rollouts.cross_checks,
            )
            run.log.save_rollouts(step, saved)
            with run.phase("rollout"):
                workers.rollouts.wait()
            metrics = partial(
                step_metrics, step, sampled, update, policy_version=step, config=config
            )
            ends.trained(step, partial(metrics, published=None))
            with run.phase("sync"):
                published = workers.rollouts.publish(policy_version=step)
            _evaluate(run, workers, step)
            record = run.log.record(metrics(published=published))
            run.log.note(
                *step_notes(step, sampled, update, config), *workers.rollouts.drain_warnings()
            )
            run.complete(step, workers.state_dict())
            ends.completed()
            run.log.note(
                *check_oracles(run.log.records, config.oracles, repeats_bits=config.repeats_bits)
            )
            if run.checkpoints.is_due(step):
                run.save(workers.begin_save, num_bytes=workers.checkpoint_bytes)
            yield record
        run.log.note(*workers.rollouts.closing_notes())
    except MegadapoError as error:
        ends.save(error)
        raise
    finally:
        run.checkpoints.join()
        run.log.note(*workers.rollouts.drain_warnings())


def _evaluate(run: Run, workers: Workers, step: int) -> None:
    """Score the published weights where this step is one that is evaluated, or begin to."""
    if run.evaluates(step):
        workers.rollouts.evaluate(step)
    for evaluation in workers.rollouts.scored():
        run.log.record_evaluation(evaluation)
