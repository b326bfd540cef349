"""The records of each step of a run with rollouts: saved rollouts, evaluations and metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

from megadapo.algorithm.advantages import Advantages
from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.observe.metrics.records import MetricRecord
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.launch import Workers
from megadapo.run.run import Run
from megadapo.run.step.metrics import step_metrics, step_warnings
from megadapo.run.step.record_writer import RecordWriter
from megadapo.run.step.saved_groups import saved_groups
from megadapo.trainer.types import UpdateResult
from megadapo.weights.sync.publish import PublishReport


class StepWriter(RecordWriter):
    """Writes saved rollouts, evaluations, metrics and checkpoints of each step."""

    compares_logprobs = True

    def __init__(self, config: RunConfig, run: Run, workers: Workers) -> None:
        super().__init__(config, run, workers.trainer)
        self._with_probe = workers.trainer.with_probe
        self._rollouts = workers.rollouts
        self._tokenizer = workers.tokenizer

    def evaluate(self, step: int) -> None:
        """Start the evaluation of the published weights if one is due; record finished ones."""
        if self._run.evaluates(step):
            self._rollouts.evaluate(step)
        for evaluation in self._rollouts.scored():
            self._until_written(partial(self._run.log.record_evaluation, evaluation))

    def update_done(
        self,
        step: int,
        sampled: SampledBatch,
        batch: PackedBatch,
        advantages: Advantages,
        update: UpdateResult,
    ) -> UpdateResult:
        """Begin to save the step's rollouts, and finish what engines do beside the update.

        From here on an early end of the run saves this step, whether or not it is published.

        Returns:
            The update with the metrics of the engines' scores.
        """
        saved = partial(
            saved_groups,
            step,
            sampled,
            batch.recorded,
            advantages,
            update,
            self._config,
            self._tokenizer,
            self._rollouts.cross_checks,
        )
        self.begin_step(
            step,
            partial(step_metrics, step, sampled, update, config=self._config),
            save_rollouts=lambda: self._run.log.save_rollouts(step, saved()),
        )
        with self._run.phase("rollout"):
            self._rollouts.wait()
        with self._run.phase("train"):
            return self._with_probe(update)

    def finish_step(
        self,
        step: int,
        sampled: SampledBatch,
        update: UpdateResult,
        published: PublishReport | None,
    ) -> MetricRecord:
        """Evaluate, record and check a published step; begin its checkpoint if one is due."""
        self.evaluate(step)
        metrics = step_metrics(step, sampled, update, config=self._config, published=published)
        return self.record_step(metrics, step_warnings(step, sampled, update, self._config))

    def _state_dict(self) -> dict[str, Any]:
        return {**self._rollouts.state_dict(), **super()._state_dict()}

    def _drain_warnings(self) -> list[str]:
        return self._rollouts.drain_warnings()
