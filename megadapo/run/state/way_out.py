"""What is finished stays finished: the last save of a run that ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megadapo.errors import (
    InfraError,
    MegadapoError,
    OracleError,
    ProcessHungError,
    RunInterruptedError,
)
from megadapo.run.run import Run
from megadapo.run.workers import Workers

StepMetrics = dict[str, int | float | None]


class FinalSave:
    """Knows what of a run is done, and saves that where the run ends early."""

    def __init__(self, run: Run, workers: Workers) -> None:
        self._run = run
        self._workers = workers
        self._is_whole = True
        """Whether the trainer is as some step left it."""
        self._trained: tuple[int, dict[str, Any], Callable[[], StepMetrics]] | None = None
        """A step of which only what follows the update is missing: its state and its metrics."""

    @contextmanager
    def trainer_changes(self) -> Iterator[None]:
        """Whatever ends this block early leaves the trainer in the middle of a step."""
        self._is_whole = False
        yield

    def trained(self, step: int, metrics: Callable[[], StepMetrics]) -> None:
        """The update of a step is done, and nothing is sampled any more.

        `metrics`: what is recorded of it if its weights cannot be published.
        """
        self._is_whole, self._trained = True, (step, self._workers.state_dict(), metrics)

    def completed(self) -> None:
        """The step that was trained is recorded, and counts."""
        self._trained = None

    def save(self, error: MegadapoError) -> None:
        """Save the last step that is done, before `error` ends the run.

        Raises:
            MegadapoError: it could not be saved, where that was all there was to do.
        """
        run = self._run
        if not self._is_whole:
            return
        try:
            if self._trained is not None:
                step, state, metrics = self._trained
                run.complete(step, state)
                if not any(record["step"] == step for record in run.log.records[-1:]):
                    run.log.record(metrics())
        except MegadapoError as failed:
            # a disk without room for a line may still have a checkpoint's
            run.log.note(f"step {run.step} is not in the metrics: {failed}")
        workers = self._workers
        if isinstance(error, ProcessHungError) and not workers.trainer.processes.all_beat():
            run.log.note(f"step {run.step} cannot be saved: a rank of the trainer hangs")
            return
        # an engine that is gone cannot be told to make room, and has made it
        begin = workers.trainer if isinstance(error, InfraError) else workers
        try:
            run.save(begin.begin_save, num_bytes=workers.checkpoint_bytes, wait=True)
        except MegadapoError as failed:
            if isinstance(error, RunInterruptedError | OracleError):
                raise
            run.log.note(str(failed))
