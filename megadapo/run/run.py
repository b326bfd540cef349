"""A run's folder and its place in the step count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

from megadapo.config import RunConfig, to_dict
from megadapo.config.recipe import RESOLVED_FILE
from megadapo.errors import ConfigError, CorruptCheckpointError
from megadapo.observe.files import replace_text
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.plot import plot_run
from megadapo.observe.summary import RunSummary, print_report
from megadapo.run.run_log import RunLog
from megadapo.run.state.checkpoint import WriteTrainer
from megadapo.run.state.drift import check_drift
from megadapo.run.state.lease import Lease
from megadapo.run.state.resume import checkpoint_store, find_start
from megadapo.run.state.run_checkpoints import RunCheckpoints
from megadapo.run.state.stop import StopSignal

GIVEN_UP = ("train", "evaluate")
"""Phases that take long, and are given up where they outlast the grace of a stop signal."""


class Run:
    """One training run on disk and on screen. Use as a context manager."""

    def __init__(self, config: RunConfig, lease: Lease, *, keeps_samples: bool) -> None:
        """`keeps_samples`: whether groups that wait from before are still what would be sampled."""
        self.folder = config.run.folder
        self.step = 0
        self.log = RunLog(config)
        self.checkpoints = RunCheckpoints(config, self.log, self.phase, keeps_samples=keeps_samples)
        self._config = config
        self._state: dict[str, Any] = {}
        self._lease = lease
        self._stop = StopSignal(grace_s=config.run.grace_s)
        self._under_way = False
        self._open = ExitStack()

    @classmethod
    def open(cls, config: RunConfig, *, accept_changes: bool = False) -> Self:
        """Take the run's folder, find where it stands, bring it to that step, and say so.

        Raises:
            CheckpointError: `run.resume` names no usable checkpoint, or says "never" in a folder
                that already holds one.
            ConfigError: `run.folder` cannot be made, another driver is at work in it, or the run
                in it learns something else and `accept_changes` is not given.
        """
        try:
            config.run.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.folder = {config.run.folder} cannot be made: {error.strerror}"
            ) from error
        with ExitStack() as failed:
            lease = Lease.take(config.run.folder)
            failed.callback(lease.close)
            run = cls._open_leased(config, lease, accept_changes=accept_changes)
            failed.pop_all()
        return run

    @classmethod
    def _open_leased(cls, config: RunConfig, lease: Lease, *, accept_changes: bool) -> Self:
        start = find_start(config)
        drift = None
        if start.checkpoint is not None:
            drift = check_drift(config, start.checkpoint.path, accept_changes=accept_changes)
        keeps_samples = drift is None or drift.keeps_samples
        run = cls(config, lease, keeps_samples=keeps_samples)
        with run._failure_is_its_end():
            replace_text(run.folder / RESOLVED_FILE, json.dumps(to_dict(config), indent=2) + "\n")
            checkpoint_store(config).remove_unfinished()
            run.checkpoints.go_on_from(start)
            run._stand_at_checkpoint()
            run.log.note(*(() if drift is None else drift.lines))
            if not keeps_samples:
                run.log.note("groups that waited are dropped: they were sampled as it was before")
        return run

    @contextmanager
    def _failure_is_its_end(self) -> Iterator[None]:
        """Write down that a run which could not even begin is none that is going on."""
        try:
            yield
        except BaseException as error:
            self.log.end(error)
            raise

    def fall_back(self, error: CorruptCheckpointError) -> None:
        """Go on from the checkpoint before the present one, which those who read it found damaged.

        Raises:
            CheckpointError: there is no other, or the user has named this one.
        """
        if self._under_way:
            raise error
        self.checkpoints.fall_back(error)
        self._stand_at_checkpoint()

    def _stand_at_checkpoint(self) -> None:
        checkpoint = self.checkpoints.current
        self.step = 0 if checkpoint is None else checkpoint.step
        self._state = {} if checkpoint is None else checkpoint.state

    def __enter__(self) -> Self:
        with ExitStack() as opened, self._failure_is_its_end():
            opened.callback(self._lease.close)
            self._stop.install()
            opened.callback(self._stop.uninstall)
            opened.enter_context(self.log.opened())
            if not self.finished:
                self.log.metrics.open_writers()
            opened.enter_context(self.checkpoints.opened())
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.uninstall()
        with self._open:
            try:
                if error is None:
                    self.checkpoints.settle(last=True)
                    self.checkpoints.finish_exports()
                else:
                    self.checkpoints.settle_after_failure()
            except BaseException as failed:
                error = failed
                raise
            finally:
                self.log.end(error)

    @property
    def finished(self) -> bool:
        return self.step >= self._config.run.num_steps

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1.

        Raises:
            RunInterruptedError: a stop was asked for; all completed steps stand.
            InfraError: another driver has taken the run's folder over.
        """
        self._under_way = True
        self.log.recall_evaluation()
        while not self.finished:
            self.checkpoints.settle(wait=False)
            self._stop.check()
            self._lease.check()
            yield self.step + 1

    @contextmanager
    def phase(self, name: str, *, interruptible: bool = False) -> Iterator[None]:
        """Show and time a phase of a step, and say when a stop signal ends it.

        Args:
            name: rollout, train, sync or anything else to be shown.
            interruptible: a stop signal ends the phase at once; only for phases that leave the
                trainer as the last completed step left it, as all before the first step do.
        """
        stopping: AbstractContextManager[None] = nullcontext()
        if interruptible or not self._under_way:
            stopping = self._stop.interruptible()
        elif name in GIVEN_UP:
            expected_s, spare_s = self.log.expected_s(name), self.checkpoints.spare_s
            stopping = self._stop.within_grace(expected_s, spare_s=spare_s)
        with self.log.phase(name), stopping:
            yield

    def complete(self, step: int, state: dict[str, Any]) -> None:
        """Count the step as done; `state` is what its checkpoint holds beside the trainer's."""
        self.step = step
        self._state = state
        self.log.status.completed(step)

    def evaluates(self, step: int) -> bool:
        """Whether the weights after `step` are scored; before the first step and after the last.

        Those of the step that a run resumed from may have been, before it was stopped.
        """
        config = self._config.evaluation
        if config.every == 0:
            return False
        due = step % config.every == 0 or step == self._config.run.num_steps
        return due and all(record.step != step for record in read_evaluations(self.folder))

    def save(self, write_trainer: WriteTrainer, *, num_bytes: int = 0, wait: bool = False) -> None:
        """Begin to checkpoint the last completed step, unless that has been done.

        A save that fails is noted and tried again after the next step; the second failure in a row
        ends the run.

        Args:
            num_bytes: of the trainer's files, about.
            wait: return when it is on the disk; any failure is raised. So after the last step.

        Raises:
            CheckpointError: it could not be written.
            InfraError: a rank of the trainer is gone.
        """
        wait = wait or self.finished
        self._lease.check()
        self.checkpoints.settle(last=wait)
        self.checkpoints.begin(self.step, write_trainer, self._state, num_bytes=num_bytes)
        if wait:
            self.checkpoints.settle(last=True)

    def finish(self) -> RunSummary:
        """Draw the plot and print the table of a run that has done all of its steps."""
        self._open.close()
        plot_run(self.folder)
        return print_report(self.folder)
