"""The DAPO loop: one call per arrow of the data flow."""

from __future__ import annotations

from megadapo.algorithm.advantages import advantages
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.config import RunConfig
from megadapo.data.batch import pack
from megadapo.errors import RunInterrupted
from megadapo.observe.metrics import EvaluationRecord
from megadapo.observe.oracles import check_oracles
from megadapo.observe.summary import RunSummary
from megadapo.run.run import Run
from megadapo.run.step_metrics import step_metrics, step_notes, verifier_note
from megadapo.run.step_rollouts import saved_groups, saved_sequences
from megadapo.run.workers import Workers, start_workers


def train(config: RunConfig) -> RunSummary:
    """Run, or go on with, the training that `config` describes, to its last step.

    Raises:
        RunInterrupted: it was asked to stop; every completed step is saved.
        MegadapoError: whatever else ended it early; the last checkpoint stands.
    """
    with Run.open(config) as run:
        if not run.finished:
            with start_workers(config, run, run.checkpoint) as workers:
                _train(config, run, workers)
    return run.finish()


def _train(config: RunConfig, run: Run, workers: Workers) -> None:
    with run.phase("publish weights"):
        workers.publish(policy_version=run.step)
    _evaluate(run, workers, run.step)
    try:
        for step in run.steps():
            with run.phase("rollout", interruptible=True):
                sampled = workers.sampler.next_batch()
            with run.phase("train"):
                response_advantages = advantages(
                    sampled.groups,
                    config.algorithm,
                    max_response_tokens=config.rollout.max_response_tokens,
                )
                batch = pack(
                    sampled.groups,
                    response_advantages,
                    loss_weights(sampled.groups, config.algorithm),
                    mini_batch_size=config.algorithm.responses_per_mini_batch,
                )
                update = workers.update(batch, step, record=saved_sequences(sampled))
            saved = saved_groups(
                step, sampled, response_advantages, update, config, workers.tokenizer
            )
            run.save_rollouts(step, saved)
            with run.phase("sync"):
                workers.publish(policy_version=step)
            evaluation = _evaluate(run, workers, step)
            version = workers.engines.policy_version
            run.record(
                step_metrics(
                    step, sampled, update, evaluation, policy_version=version, config=config
                )
            )
            run.note(*step_notes(step, sampled, update, config.sampling.prompts_per_step))
            check_oracles(run.records, config.oracles)
            run.complete(step, workers.state_dict())
            if run.saves:
                run.save(workers.trainer.save)
        run.note(verifier_note(workers.verifier.counts))
    except RunInterrupted:
        # the trainer is as the last completed step left it: only rollouts are interruptible
        run.save(workers.trainer.save)
        raise


def _evaluate(run: Run, workers: Workers, step: int) -> EvaluationRecord | None:
    """Score the published weights where this step is one that is evaluated."""
    if not run.evaluates(step):
        return None
    with run.phase("evaluate"):
        evaluation = workers.evaluate(step)
    run.record_evaluation(evaluation)
    return evaluation
