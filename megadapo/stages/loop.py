"""Stages of training on rows of data, without rollouts: one loop for all of them.

A stage gives the updates on its rows and the held-out metrics. The run's folder, checkpoints, stop
signals and records are those of a run with rollouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from megadapo.cluster.calls import Watch
from megadapo.config import RunConfig
from megadapo.data.order import Share, WeightedOrder
from megadapo.errors import CorruptCheckpointError, DataError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.run.fewer import fit_to_cluster
from megadapo.run.inputs import start_cluster
from megadapo.run.processes import GpuSharing, start_trainer
from megadapo.run.run import Run
from megadapo.run.state.checkpoint import ROWS_STATE
from megadapo.run.step.metrics import skipped_updates, update_metrics
from megadapo.run.step.record_writer import RecordWriter
from megadapo.run.step.training import TrainerState
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import Metrics, TrainerSettings, UpdateRequest


class Stage(ABC):
    """The data of a stage, and its updates."""

    command: str
    """The command that runs it; checkpoints belong to it."""
    shares: Sequence[Share]
    """Sources of the rows, in the rows' order."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows of data.train."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the rows, to which a resumed run compares its own."""

    @abstractmethod
    def settings(self) -> TrainerSettings:
        """Return the settings of the trainer's ranks."""

    @abstractmethod
    def request(self, rows: Sequence[int], step: int) -> UpdateRequest:
        """Return the update of a step on the rows with these numbers."""

    @abstractmethod
    def evaluate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of the held-out rows under the current weights."""


def run_stage(
    config: RunConfig,
    stage: Stage,
    *,
    accept_changes: Collection[str] = (),
    allow_fewer: bool = False,
) -> None:
    """Start or resume the run that `config` describes, and train to its last step.

    Args:
        accept_changes: keys that a resumed run may change although they decide what it learns.
        allow_fewer: start with fewer data-parallel ranks if nodes are missing.
    """
    config = with_num_steps(config, stage.num_rows)
    warnings = config.warnings()
    recipe = config
    if allow_fewer:
        config, changes = fit_to_cluster(config, has_engines=False)
        warnings += changes
    with Run.open(recipe, accept_changes=accept_changes, command=stage.command) as run:
        run.log.show(*warnings)
        while not run.finished:
            try:
                with start_stage(config, run, stage) as trainer:
                    for _ in stage_steps(config, run, stage, trainer):
                        pass
            except CorruptCheckpointError as error:
                run.fall_back(error)
    run.finish()


def with_num_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """Return the configuration with the number of steps that supervised.epochs sets, if any."""
    epochs, size = config.supervised.epochs, config.supervised.rows_per_update
    if epochs is None:
        return config
    run = config.run.model_copy(update={"num_steps": -(-epochs * num_rows // size)})
    return config.model_copy(update={"run": run})


@contextmanager
def start_stage(config: RunConfig, run: Run, stage: Stage) -> Iterator[TrainerState]:
    """Start the trainer at the run's checkpoint, if there is one; end it on exit.

    Raise DataError if the rows differ from the checkpoint's.
    """
    checkpoint = run.checkpoints.current
    is_strict = checkpoint is not None and not checkpoint.accepts_other_data
    if checkpoint and is_strict and checkpoint.state.get(ROWS_STATE) != stage.fingerprint:
        raise DataError(
            "the rows of data.train have changed since the checkpoint was saved: resume with the "
            "same, choose another run.folder, or add --accept-changes=data.train, with which each "
            "further step has the rows that it would have if the run had started with the new ones"
        )
    with ExitStack() as stack:
        cluster = start_cluster(config, run, stack, trains=True, num_engines=0)
        watch = Watch()
        watch.add(cluster.daemons.check, during_updates=False)
        settings = replace(stage.settings(), reads_weights=checkpoint is None)
        trainer = start_trainer(config, settings, run, cluster, stack, watch)
        watch.add(lambda: run.log.status.report_progress(trainer.num_micro_batches, 0))
        state = TrainerState(trainer, GpuSharing(trainer), {ROWS_STATE: stage.fingerprint})
        if checkpoint is not None:
            with run.phase("load checkpoint"):
                state.load(checkpoint)
        yield state


def stage_steps(
    config: RunConfig, run: Run, stage: Stage, trainer: TrainerState
) -> Generator[MetricRecord, None, None]:
    """Yield the record of each remaining step; a step runs when its record is requested."""
    writer = RecordWriter(config, run, trainer)
    rows = RowOrder(config, stage.num_rows, stage.shares)
    with writer.saving_last_step():
        if run.step == 0 and run.evaluates(0):
            with run.phase("evaluate"):
                found = stage.evaluate(trainer.ranks)
            run.log.show(*(f"before the first step: {name} = {found[name]}" for name in found))
        for step in run.steps():
            with run.phase("train"):
                update = trainer.apply(stage.request(rows.of_step(step), step))
            metrics = update_metrics(step, update)
            writer.begin_step(step, partial(dict, metrics))
            if run.evaluates(step):
                with run.phase("evaluate"):
                    metrics |= stage.evaluate(trainer.ranks)
            yield writer.record_step(metrics, skipped_updates(step, update))


class RowOrder:
    """The rows of each step, shuffled again in each epoch unless data.shuffle is off."""

    def __init__(
        self, config: RunConfig, num_rows: int, shares: Sequence[Share] | None = None
    ) -> None:
        """`shares`: the sources of the rows; None: they are one source."""
        self._size = config.supervised.rows_per_update
        epochs = config.supervised.epochs
        self._end = None if epochs is None else epochs * num_rows
        shares = shares or (Share("", num_rows, 1.0),)
        self._order = WeightedOrder(
            shares, config.run.seed, name="rows", shuffle=config.data.shuffle
        )

    def of_step(self, step: int) -> list[int]:
        """Return the numbers of a step's rows; the last step of the last epoch may have fewer."""
        stop = step * self._size
        stop = stop if self._end is None else min(stop, self._end)
        return [self._order.at(index) for index in range((step - 1) * self._size, stop)]
