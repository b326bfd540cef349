"""The record and the checkpoint of each step, and the last save of a run that ends early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megadapo.algorithm.advantages import Advantages
from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.errors import (
    InfraError,
    MegadapoError,
    OracleError,
    ProcessHungError,
    RunInterruptedError,
)
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.oracles import check_oracles
from megadapo.rollout.pool.publish import PublishReport
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.launch import Workers
from megadapo.run.run import Run
from megadapo.run.state.run_checkpoints import FAILING_S
from megadapo.run.step.metrics import step_metrics, step_warnings
from megadapo.run.step.saved_groups import saved_groups
from megadapo.run.step.training import TrainerState
from megadapo.trainer.types import UpdateResult

RETRY_S = 5.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class _UpdatedStep:
    """A step whose update is complete and whose record is not written yet."""

    step: int
    metrics: Callable[[], MetricRecord]
    """Returns the metrics to record if the weights cannot be published."""
    save_rollouts: Callable[[], None]
    """Begins to save the step's rollouts."""


class RecordWriter:
    """Writes records and checkpoints of each step."""

    compares_logprobs = False
    """Whether updates have old log-probs, which bounds of `[oracles]` are about."""

    def __init__(self, config: RunConfig, run: Run, trainer: TrainerState) -> None:
        self._config = config
        self._run = run
        self._trainer = trainer
        self._updated: _UpdatedStep | None = None

    @contextmanager
    def saving_last_step(self) -> Iterator[None]:
        """Save the last complete step if an error ends this block, then re-raise the error."""
        try:
            yield
        except Exception as error:
            # a boundary: whatever happened, what is complete must be saved
            self._save_last_step(error)
            raise
        finally:
            self._run.checkpoints.join()
            self._run.log.show(*self._drain_warnings())

    def begin_step(
        self,
        step: int,
        metrics: Callable[[], MetricRecord],
        save_rollouts: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save the rollouts of a step whose update is complete.

        From here on an early end of the run saves this step, with what `metrics` returns.
        """
        self._updated = _UpdatedStep(step, metrics, save_rollouts)
        save_rollouts()

    def record_step(self, metrics: MetricRecord, warnings: Iterable[str]) -> MetricRecord:
        """Record and check the step that began; begin its checkpoint if one is due."""
        run = self._run
        record = self._until_written(partial(self._record, metrics))
        run.log.show(*warnings, *self._drain_warnings())
        assert self._updated is not None, "begin_step comes first"
        run.complete(self._updated.step, self._state_dict())
        self._updated = None
        # after the record, so that metrics.jsonl shows the step that broke a bound
        self._check_oracles()
        if run.saves(run.step):
            run.save(self._trainer.begin_save, num_bytes=self._trainer.ranks.checkpoint_bytes)
        return record

    def _record(self, metrics: MetricRecord) -> MetricRecord:
        """Record a step; if that fails, begin to save its rollouts again for the next try."""
        try:
            return self._run.log.record(metrics)
        except InfraError:
            if self._updated is not None:
                self._updated.save_rollouts()
            raise

    def _until_written(self, write: Callable[[], Result]) -> Result:
        """Write to the run's folder; if it fails, try again for as long as a save is tried."""
        until, shown = time.monotonic() + FAILING_S, False
        while True:
            try:
                return write()
            except (InfraError, OSError) as error:
                if time.monotonic() > until:
                    raise
                if not shown:
                    self._run.log.show(f"{error}; trying again for {FAILING_S / 60:g} minutes")
                shown = True
            with self._run.phase("wait for the run's folder", interruptible=True):
                time.sleep(RETRY_S)

    def _check_oracles(self) -> None:
        """Check the newest step, and send an event for each bound that it broke."""
        config, log = self._config, self._run.log
        try:
            broken = check_oracles(
                log.records,
                config.oracles,
                is_deterministic=config.is_deterministic,
                compares_logprobs=self.compares_logprobs,
            )
        except OracleError as error:
            log.send_event("oracle", reason=str(error))
            raise
        for message in broken:
            log.send_event("oracle", reason=message)
        log.show(*broken)

    def _state_dict(self) -> dict[str, Any]:
        return self._trainer.state_dict()

    def _drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        return []

    def _save_last_step(self, error: Exception) -> None:
        """Save the last complete step before `error` ends the run.

        If that fails too, it is an error after a stop or a broken bound, and a message otherwise.
        """
        run, trainer = self._run, self._trainer
        if trainer.step != (run.step if self._updated is None else self._updated.step):
            # the trainer is in the middle of an update, and its weights belong to no step
            saved = run.log.status.current.checkpoint_step
            run.log.show(f"the update of step {run.step + 1} was cut off; step {saved} is saved")
            return
        self._complete_updated_step()
        if isinstance(error, ProcessHungError) and not trainer.ranks.all_alive():
            run.log.show(f"step {run.step} cannot be saved: a rank of the trainer hangs")
            return
        try:
            run.save(trainer.begin_save, num_bytes=trainer.ranks.checkpoint_bytes, wait=True)
        except MegadapoError as failed:
            if isinstance(error, RunInterruptedError | OracleError):
                raise
            run.log.show(str(failed))

    def _complete_updated_step(self) -> None:
        """Count and record a step whose update is done, though it may not be published."""
        updated, run = self._updated, self._run
        if updated is None:
            return
        try:
            run.complete(updated.step, self._state_dict())
            if not any(record["step"] == updated.step for record in run.log.records[-1:]):
                run.log.record(updated.metrics())
        except MegadapoError as failed:
            # a disk without room for the record may still have room for the checkpoint
            run.log.show(f"step {run.step} is not in the metrics: {failed}")


class StepWriter(RecordWriter):
    """Writes saved rollouts, evaluations, metrics and checkpoints of each step."""

    compares_logprobs = True

    def __init__(self, config: RunConfig, run: Run, workers: Workers) -> None:
        super().__init__(config, run, workers.trainer)
        self._rollouts = workers.rollouts
        self._tokenizer = workers.tokenizer

    def evaluate(self, step: int) -> None:
        """Start the evaluation of the published weights if one is due; record finished ones."""
        if self._run.evaluates(step):
            self._rollouts.evaluate(step)
        for evaluation, groups in self._rollouts.scored():
            self._until_written(partial(self._run.log.record_evaluation, evaluation, groups))

    def save_rollouts(
        self,
        step: int,
        sampled: SampledBatch,
        batch: PackedBatch,
        advantages: Advantages,
        update: UpdateResult,
    ) -> None:
        """Begin to save the rollouts of a step whose update is complete.

        From here on an early end of the run saves this step, whether or not it is published.
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

    def finish_step(
        self,
        step: int,
        sampled: SampledBatch,
        update: UpdateResult,
        published: PublishReport | None,
    ) -> MetricRecord:
        """Record and check a published step; begin its checkpoint if one is due."""
        metrics = step_metrics(step, sampled, update, config=self._config, published=published)
        return self.record_step(metrics, step_warnings(step, sampled, update, self._config))

    def _state_dict(self) -> dict[str, Any]:
        return {**self._rollouts.state_dict(), **super()._state_dict()}

    def _drain_warnings(self) -> list[str]:
        return self._rollouts.drain_warnings()
