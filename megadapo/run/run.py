"""A run's folder, its clock and its place in the step count."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megadapo.cluster.memory import MIB, private_bytes
from megadapo.config import RunConfig, to_dict
from megadapo.config.recipe import RESOLVED_FILE
from megadapo.errors import ConfigError, DamageError, MegadapoError
from megadapo.kernels.torch_internals import profiled_range
from megadapo.observe.files import replace_text
from megadapo.observe.metrics import (
    EvaluationRecord,
    MetricRecord,
    MetricsLog,
    read_evaluations,
    read_metrics,
)
from megadapo.observe.plot import plot_run
from megadapo.observe.progress import RunDisplay
from megadapo.observe.rollouts import RolloutLog
from megadapo.observe.saved_group import SavedGroup
from megadapo.observe.summary import RunSummary, print_report
from megadapo.rollout.answer_log import answers_path
from megadapo.rollout.journal import forget_before
from megadapo.run.background_export import BackgroundExports
from megadapo.run.background_saves import BackgroundSaves
from megadapo.run.checkpoint import (
    EVALUATING,
    Checkpoint,
    WriteTrainer,
)
from megadapo.run.drift import check_drift
from megadapo.run.lease import Lease
from megadapo.run.resume import Named, Start, checkpoint_store, find_start, named_steps
from megadapo.run.rollouts import without_samples
from megadapo.run.status import StatusFile
from megadapo.run.stop import StopSignal

GIVEN_UP = ("train", "evaluate")
"""Phases that take long, and are given up where they outlast the grace of a stop signal."""
NEWEST = 5
"""Steps by which a phase's time is told."""
SAVE_MARGIN = 1.5
"""A save that is waited for may take that much longer than the slowest one so far."""


class Run:
    """One training run on disk and on screen. Use as a context manager."""

    def __init__(self, config: RunConfig, lease: Lease):
        self.folder = config.run.folder
        self.checkpoint: Checkpoint | None = None
        self.step = 0
        self.records: list[MetricRecord] = []
        self._config = config
        self._state: dict[str, Any] = {}
        self._lease = lease
        self._status = StatusFile(self.folder, num_steps=config.run.num_steps)
        self._store = checkpoint_store(config)
        self._saves = BackgroundSaves(self._store, config)
        self._metrics = MetricsLog(
            self.folder, writers=config.observe.writers, config=to_dict(config)
        )
        self._rollouts = RolloutLog(self.folder)
        self._display = RunDisplay(self.folder, num_steps=config.run.num_steps)
        self._seconds: dict[str, float] = defaultdict(float)
        self._evaluated: EvaluationRecord | None = None
        """The newest evaluation that no step's record has."""
        self._stop = StopSignal(grace_s=config.run.grace_s)
        self._under_way = False
        self._exports = BackgroundExports(self.folder, self.note)
        self._damaged: dict[Path, str] = {}
        """Checkpoints that cannot be used, and why."""
        self._named: Named | None = None
        """The checkpoint that the user has named, where the run goes on from it."""
        self._keeps_samples = True
        """Whether groups that wait from before are still what would be sampled."""
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
        run = cls(config, lease)
        replace_text(run.folder / RESOLVED_FILE, json.dumps(to_dict(config), indent=2) + "\n")
        run._store.remove_unfinished()
        run._keeps_samples = drift is None or drift.keeps_samples
        run._go_on_from(start)
        run.note(*(() if drift is None else drift.lines))
        if not run._keeps_samples:
            run.note("groups that waited are dropped: they were sampled as it was before")
        return run

    def fall_back(self, error: DamageError) -> None:
        """Go on from the checkpoint before the present one, which those who read it found damaged.

        Raises:
            CheckpointError: there is no other, or the user has named this one.
        """
        if self.checkpoint is None or self._named is not None or self._under_way:
            raise error
        self._damaged[self.checkpoint.path] = str(error)
        start = find_start(self._config, damaged=self._damaged)
        self._exports.end()
        self._go_on_from(start)
        self._metrics.open_writers()
        self._start_export()

    def _go_on_from(self, start: Start) -> None:
        """Bring everything in the folder to where the run goes on."""
        checkpoint = start.checkpoint
        if checkpoint is not None and not self._keeps_samples:
            checkpoint = replace(checkpoint, state=without_samples(checkpoint.state))
        self.checkpoint = checkpoint
        self.step = 0 if checkpoint is None else checkpoint.step
        self._state = {} if checkpoint is None else checkpoint.state
        self._saves.step = self.step
        self._status.resumed(self.step)
        aside = self._store.set_aside_after(self.step, damaged=start.named is None)
        self._named = start.named
        if start.named is not None:
            # only now: whatever is later than it comes after it
            start.named.write(self.folder)
        self._exports.tidy(self.step)
        # nothing recorded counts where no checkpoint stands, the first evaluation included
        recorded = self.step if checkpoint is not None else -1
        self._metrics.rewind(recorded)
        self._rollouts.rewind(recorded)
        self.records = read_metrics(self.folder)
        self._display.restore(self.records, read_evaluations(self.folder))
        self.note(*start.notes, *(f"set aside: {path}" for path in aside))

    def __enter__(self) -> Self:
        self._open.callback(self._lease.close)
        self._stop.install()
        self._open.enter_context(self._metrics)
        self._open.enter_context(self._display)
        self._open.callback(self._rollouts.close)
        if not self.finished:
            self._metrics.open_writers()
        self._open.enter_context(self._exports)
        self._open.callback(self._saves.close)
        # a run that was stopped has ended the export of the checkpoint it resumes from
        self._start_export()
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
                    self.settle(last=True)
                    self._finish_exports()
                else:
                    self._settle_after_failure()
            except BaseException as failed:
                error = failed
                raise
            finally:
                self._display.write(self._status.end(error), console=False)

    @property
    def finished(self) -> bool:
        return self.step >= self._config.run.num_steps

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1.

        Raises:
            RunInterrupted: a stop was asked for; all completed steps stand.
            InfraError: another driver has taken the run's folder over.
        """
        self._under_way = True
        self._evaluated = self._unreported()
        while not self.finished:
            self.settle(wait=False)
            self._stop.check()
            self._lease.check()
            yield self.step + 1

    @contextmanager
    def phase(self, name: str, *, interruptible: bool = False) -> Iterator[None]:
        """Show and time a phase of a step; the time of a phase within it is not its own.

        Args:
            name: rollout, train, sync or anything else to be shown.
            interruptible: a stop signal ends the phase at once; only for phases that leave the
                trainer as the last completed step left it, as all before the first step do.
        """
        self._display.phase(name)
        self._status.phase(name)
        start, counted = time.perf_counter(), sum(self._seconds.values())
        stopping: AbstractContextManager[None] = nullcontext()
        if interruptible or not self._under_way:
            stopping = self._stop.interruptible()
        elif name in GIVEN_UP:
            stopping = self._stop.within_grace(self._expected_s(name), spare_s=self._spare_s)
        with profiled_range(f"megadapo::{name}"), stopping:
            yield
        within = sum(self._seconds.values()) - counted
        self._seconds[name] += time.perf_counter() - start - within

    def gets_on(self, *, micro_batches: int, tokens: int) -> None:
        """Let the run's status say how far trainer and engines are within the phase."""
        self._status.gets_on(micro_batches=micro_batches, tokens=tokens)

    def record(self, values: Mapping[str, int | float | None]) -> MetricRecord:
        """Write and show one step's metrics; times, the driver's memory and what was evaluated are
        added here.

        What was saved of the step is on the disk before.

        Raises:
            InfraError: it could not be written.
        """
        self._rollouts.wait()
        seconds, self._seconds = self._seconds, defaultdict(float)
        step_s = sum(seconds[name] for name in ("rollout", "train", "sync"))
        times: dict[str, float | None] = {
            f"time/{name}_s": seconds[name]
            for name in ("rollout", "train", "sync", "evaluate", "checkpoint")
        }
        generated, speed = values.get("tokens/generated"), None
        if generated is None:
            # a step that generates nothing has no engines to send weights to
            times["time/sync_s"] = None
        else:
            speed = generated / step_s
        record = self._metrics.record(
            {
                **{**values, **times, "time/step_s": step_s, "tokens_per_s": speed},
                "memory/driver_mib": private_bytes(os.getpid()) / MIB,
                **self._take_evaluated(),
            }
        )
        self.records.append(record)
        self._display.step(record)
        return record

    def save_rollouts(self, step: int, groups: Iterable[SavedGroup]) -> None:
        """Begin to write what is saved of a step; the step's record waits for it."""
        if self._config.observe.saved_groups != 0:
            self._rollouts.write(step, groups)

    def record_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Write and show one held-out evaluation; its answers need not be kept any more."""
        self._metrics.record_evaluation(evaluation)
        self._display.evaluation(evaluation)
        self._evaluated = evaluation
        answers_path(self.folder, evaluation.step).unlink(missing_ok=True)

    def complete(self, step: int, state: dict[str, Any]) -> None:
        """Count the step as done; `state` is what its checkpoint holds beside the trainer's."""
        self.step = step
        self._state = state
        self._status.completed(step)

    def evaluates(self, step: int) -> bool:
        """Whether the weights after `step` are scored; before the first step and after the last.

        Those of the step that a run resumed from may have been, before it was stopped.
        """
        config = self._config.evaluation
        if config.every == 0:
            return False
        due = step % config.every == 0 or step == self._config.run.num_steps
        return due and all(record.step != step for record in read_evaluations(self.folder))

    @property
    def saves(self) -> bool:
        """Whether the completed step gets a checkpoint.

        Every one does where the next update would outlast the grace of a stop signal: it is given
        up then, and its weights are of no step.
        """
        grace_s = self._config.run.grace_s
        outlasts = 0 < grace_s < self._expected_s("train") + self._spare_s
        return self.finished or outlasts or self._saves.is_due(self.step)

    @property
    def _spare_s(self) -> float:
        """What a save may take, as far as is known."""
        return SAVE_MARGIN * self._saves.longest_s

    def _expected_s(self, name: str) -> float:
        """What a phase may take, by the newest steps; 0 where none had it."""
        times = (record.get(f"time/{name}_s") for record in self.records[-NEWEST:])
        return max((float(one) for one in times if one), default=0.0)

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
        self.settle(last=wait)
        if self.step != self._saves.step:
            self._exports.collect()
            in_use = self._steps_to_keep() | {self._state.get(EVALUATING, self.step)}
            with self.phase("checkpoint"):
                self._saves.begin(
                    self.step, write_trainer, self._state, num_bytes=num_bytes, in_use=in_use
                )
        if wait:
            self.settle(last=True)

    def settle(self, *, wait: bool = True, last: bool = False) -> None:
        """Take note of the save that is under way, if any.

        Args:
            wait: for it to end; else nothing is done while it is under way.
            last: there is no next step to try again after.
        """
        with self.phase("checkpoint") if wait else nullcontext():
            ended, note = self._saves.ended(wait=wait, last=last)
        if note:
            self.note(note)
        if ended is not None:
            self.checkpoint = ended
            self._status.saved(ended.step)
            forget_before(self.folder, ended.step)
            self._start_export()

    def join_save(self) -> None:
        """Wait for the save under way, if any, while there still is a trainer."""
        self._saves.join()

    def _settle_after_failure(self) -> None:
        """Take note of the save under way; what ended the run is what is to be reported."""
        try:
            self.settle(last=True)
        except MegadapoError as error:
            self.note(str(error))

    def _unreported(self) -> EvaluationRecord | None:
        """The newest evaluation, where the record that has it is written anew.

        What was scored before the first step need not be in one.
        """
        evaluations = read_evaluations(self.folder)
        if not evaluations or evaluations[-1].step == 0:
            return None
        reported = {record.get("eval/policy_version") for record in self.records}
        return None if evaluations[-1].policy_version in reported else evaluations[-1]

    def _take_evaluated(self) -> dict[str, int | float | None]:
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is None:
            return {}
        return {
            "eval/accuracy": evaluated.accuracy,
            "eval/policy_version": evaluated.policy_version,
        }

    def _start_export(self) -> None:
        """Export the newest checkpoint where `checkpoint.export_every` asks for its step."""
        every, checkpoint = self._config.checkpoint.export_every, self.checkpoint
        if every == 0 or checkpoint is None:
            return
        if checkpoint.step % every == 0 or checkpoint.step >= self._config.run.num_steps:
            self._exports.start(checkpoint.path, checkpoint.step)

    def _finish_exports(self) -> None:
        if self._exports.steps:
            with self.phase("export"):
                self._exports.wait()
            self._store.prune(self._steps_to_keep())

    def _steps_to_keep(self) -> frozenset[int]:
        """Steps whose checkpoints are being exported, or were named to go on from."""
        return self._exports.steps | named_steps(self.folder)

    def note(self, *texts: str) -> None:
        """Show messages that must not be missed."""
        for text in texts:
            self._display.note(text)

    def finish(self) -> RunSummary:
        """Draw the plot and print the table of a run that has done all of its steps."""
        self._open.close()
        plot_run(self.folder)
        return print_report(self.folder)
