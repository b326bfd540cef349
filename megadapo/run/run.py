"""One training run: its folder, its step count, and how it starts, stops and ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from megadapo.cluster.process_log import driver_log, stacks_on_quit
from megadapo.config import RunConfig, to_dict
from megadapo.errors import CheckpointError, CorruptCheckpointError
from megadapo.models.folder import copy_small_files
from megadapo.observe.files import make_folder, replace_text
from megadapo.observe.plot import PLOT_FILE, plot_runs
from megadapo.observe.run_records import MODEL_FOLDER, RESOLVED_FILE
from megadapo.observe.summary import print_report
from megadapo.run.run_log import RunLog
from megadapo.run.state.checkpoint import Checkpoint, WriteTrainer
from megadapo.run.state.lease import Lease
from megadapo.run.state.resume import (
    LEARNING_KEYS,
    SUPERVISED_KEYS,
    accepts_other_data,
    check_config_diff,
    checkpoint_store,
    find_resume_point,
    model_files,
)
from megadapo.run.state.run_checkpoints import RunCheckpoints
from megadapo.run.state.stop import EVALUATE_SIGNAL, SAVE_SIGNAL, StopSignal, watching_stop_file

BOUNDED_PHASES = ("train", "evaluate")
"""Long phases that a stop signal interrupts if they would outlast `run.grace_s`."""
TRAIN, STAGE = "train", "stage"
"""The command of a run with rollouts, and the key of a run's state that names any other command."""

_LOGGER = logging.getLogger(__name__)


class Run:
    """One training run on disk and on screen."""

    def __init__(self, config: RunConfig, lease: Lease, command: str = TRAIN) -> None:
        self.folder = config.run.folder
        self.step = 0
        """Last completed step."""
        self.log = RunLog(config)
        self.checkpoints = RunCheckpoints(config, self.log, self.phase)
        self._config = config
        self._state: dict[str, Any] = {}
        self._lease = lease
        self.log.status.may_write = lambda: not lease.is_lost()
        self._command = command
        self._stop = StopSignal(grace_s=config.run.grace_s)
        self._is_stepping = False

    @classmethod
    @contextmanager
    def open(
        cls, config: RunConfig, *, accept_changes: Collection[str] = (), command: str = TRAIN
    ) -> Iterator[Self]:
        """Lease the run's folder, and bring it to the checkpoint that the run resumes from.

        On exit, wait for checkpoints, and write to status.json how the run ended.

        Args:
            accept_changes: keys and tables that may differ from the checkpoint's configuration
                although they decide what is learned.
            command: the command of the run, which must also have written the checkpoint.
        """
        folder = config.run.folder
        warnings = make_folder(folder)
        with ExitStack() as stack:
            lease = stack.enter_context(closing(Lease.take(folder)))
            point, changes = find_resume_point(config, checkpoint_store(config)), list[str]()
            models = model_files(config)
            if point.checkpoint is not None:
                _check_command(point.checkpoint, command)
                keys = LEARNING_KEYS if command == TRAIN else SUPERVISED_KEYS
                changes = check_config_diff(
                    config, point.checkpoint, accepted=accept_changes, keys=keys, models=models
                )
                accepts = accepts_other_data(config, point.checkpoint, accept_changes)
                checkpoint = replace(point.checkpoint, accepts_other_data=accepts)
                point = replace(point, checkpoint=checkpoint)
            run = cls(config, lease, command)
            run.checkpoints.models = models
            stack.push(run._end)
            replace_text(folder / RESOLVED_FILE, json.dumps(to_dict(config), indent=2) + "\n")
            copy_small_files(Path(config.model.path), folder / MODEL_FOLDER)
            run.checkpoints.resume_from(point)
            run._restore_step()
            run.log.show(*warnings, *changes)
            run._stop.install()
            stack.callback(run._stop.uninstall)
            stack.enter_context(watching_stop_file(folder, run._stop))
            stack.enter_context(stacks_on_quit(driver_log(folder)))
            stack.enter_context(run.log.opened())
            if not run.finished:
                run.log.metrics.open_writers()
            stack.enter_context(run.checkpoints.opened())
            # a signal while the run closes does not end it; a second one does
            yield run

    def _end(self, kind: object, error: BaseException | None, trace: object) -> None:
        # the log also ends if the last save fails
        self.log.end(error, stays_stopped=self._stop.stays_stopped)

    def fall_back(self, error: CorruptCheckpointError) -> None:
        """Resume from the checkpoint before the current one, as `RunCheckpoints.fall_back`."""
        if self._is_stepping:
            raise error
        self.checkpoints.fall_back(error)
        self._restore_step()

    def _restore_step(self) -> None:
        checkpoint = self.checkpoints.current
        self.step = 0 if checkpoint is None else checkpoint.step
        self._state = {} if checkpoint is None else checkpoint.state

    @property
    def finished(self) -> bool:
        return self.step >= self._config.run.num_steps

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1."""
        self._is_stepping = True
        self.log.recall_evaluation()
        while not self.finished:
            self.checkpoints.settle(wait=False)
            self._stop.check()
            self._lease.check()
            yield self.step + 1

    @contextmanager
    def phase(self, name: str, *, interruptible: bool = False) -> Iterator[None]:
        """Show and time a phase of a step, and decide when a stop signal ends it.

        Args:
            name: rollout, train, sync or any other name to show.
            interruptible: whether a stop signal ends the phase at once. The trainer must then have
                the weights of a completed step. Phases before the first step always end at once.
        """
        stopping: AbstractContextManager[None] = nullcontext()
        if interruptible or not self._is_stepping:
            stopping = self._stop.interruptible()
        elif name in BOUNDED_PHASES:
            stopping = self._stop.within_grace(
                self.log.expected_s(name), reserved_s=self.checkpoints.reserved_s
            )
        with self.log.phase(name), stopping:
            yield

    def complete(self, step: int, state: dict[str, Any]) -> None:
        """Count the step as completed; `state` goes into its checkpoint."""
        self.step = step
        self._state = state if self._command == TRAIN else {**state, STAGE: self._command}
        self.log.status.complete(step)
        self.log.send_event("step")

    def evaluates(self, step: int) -> bool:
        """Return whether the weights after `step` must be evaluated and are not evaluated yet."""
        config = self._config.evaluation
        due = self._stop.take(EVALUATE_SIGNAL)
        if due and self._config.data.held_out is None:
            self.log.show(f"{EVALUATE_SIGNAL.name}: data.held_out is not set")
            return False
        if config.every > 0:
            due |= step % config.every == 0 or step == self._config.run.num_steps
        return due and step not in self.log.evaluated_steps

    def checks_first_ratio(self, step: int) -> bool:
        """Return whether GPUs measure the first ratio of a step that begins its update.

        They do in the first step, and in each step whose checkpoint is due before its update. A
        signal may ask for a checkpoint later.
        """
        return step == 1 or self.checkpoints.is_due(step)

    def saves(self, step: int) -> bool:
        """Return whether the completed step gets a checkpoint, as one that a signal asks for."""
        is_asked = self._stop.take(SAVE_SIGNAL)
        return is_asked or self.checkpoints.is_due(step)

    def save(self, write_trainer: WriteTrainer, *, num_bytes: int = 0, wait: bool = False) -> None:
        """Begin to checkpoint the last completed step unless it is saved already.

        A failed save is shown and repeated after each step; when none has succeeded for ten
        minutes, the run ends.

        Args:
            num_bytes: approximate size of the trainer's files.
            wait: whether to wait for the checkpoint and raise any failure, as after the last step.
        """
        wait = wait or self.finished
        self._lease.check()
        self.checkpoints.settle(last=wait)
        self.checkpoints.begin(self.step, write_trainer, self._state, num_bytes=num_bytes)
        if wait:
            self.checkpoints.settle(last=True)

    def finish(self) -> None:
        """Plot a run that has done all its steps, and print its table."""
        try:
            plot_runs([self.folder], self.folder / PLOT_FILE)
        except ModuleNotFoundError as error:
            # all steps are done, and saved: only the picture is missing
            _LOGGER.warning("no plot is drawn: %s", error)
        print_report(self.folder, command=self._command)


def _check_command(checkpoint: Checkpoint, command: str) -> None:
    """Raise CheckpointError if another command wrote the run's checkpoint."""
    writer = checkpoint.state.get(STAGE, TRAIN)
    if writer != command:
        raise CheckpointError(
            f"megadapo {writer} wrote {checkpoint.path}, so megadapo {command} cannot resume from "
            "it: choose another run.folder; to start from its weights, write them to a folder with "
            "megadapo export, and set model.path to that folder"
        )
