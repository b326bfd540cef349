"""The checkpoints of a run: which one it goes on from, which it makes, keeps and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig
from megadapo.errors import CorruptCheckpointError, MegadapoError
from megadapo.rollout.journal.journal import forget_before
from megadapo.run.export.background_export import BackgroundExports
from megadapo.run.rollouts import without_samples
from megadapo.run.run_log import RunLog
from megadapo.run.state.background_saves import BackgroundSaves
from megadapo.run.state.checkpoint import EVALUATING, Checkpoint, WriteTrainer
from megadapo.run.state.resume import Named, Start, checkpoint_store, find_start, named_steps

SAVE_MARGIN = 1.5
"""A save that is waited for may take that much longer than the slowest one so far."""


class RunCheckpoints:
    """The checkpoints of one run and their exports."""

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        phase: Callable[[str], AbstractContextManager[None]],
        *,
        keeps_samples: bool,
    ) -> None:
        """`keeps_samples`: whether groups that wait from before are still what would be sampled."""
        self.current: Checkpoint | None = None
        """What a start goes on from."""
        self._config = config
        self._folder = config.run.folder
        self._log = log
        self._phase = phase
        self._keeps_samples = keeps_samples
        self._store = checkpoint_store(config)
        self._saves = BackgroundSaves(self._store, config)
        self._exports = BackgroundExports(self._folder, log.note)
        self._damaged: dict[Path, str] = {}
        """Checkpoints that cannot be used, and why."""
        self._named: Named | None = None
        """The checkpoint that the user has named, where the run goes on from it."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let saves and exports be made within this block; none is under way when it ends."""
        with self._exports:
            try:
                # a run that was stopped has ended the export of the checkpoint it resumes from
                self._start_export()
                yield
            finally:
                self._saves.close()

    def go_on_from(self, start: Start) -> None:
        """Bring everything in the folder to where the run goes on."""
        checkpoint = start.checkpoint
        if checkpoint is not None and not self._keeps_samples:
            checkpoint = replace(checkpoint, state=without_samples(checkpoint.state))
        self.current = checkpoint
        step = 0 if checkpoint is None else checkpoint.step
        self._saves.step = step
        self._log.status.resumed(step)
        aside = self._store.set_aside_after(step, damaged=start.named is None)
        self._named = start.named
        if start.named is not None:
            # only now: whatever is later than it comes after it
            start.named.write(self._folder)
        self._exports.tidy(step)
        # nothing recorded counts where no checkpoint stands, the first evaluation included
        self._log.rewind(step if checkpoint is not None else -1)
        self._log.note(*start.notes, *(f"set aside: {path}" for path in aside))

    def fall_back(self, error: CorruptCheckpointError) -> None:
        """Go on from the checkpoint before the present one, which those who read it found damaged.

        Raises:
            CheckpointError: there is no other, or the user has named this one.
        """
        if self.current is None or self._named is not None:
            raise error
        self._damaged[self.current.path] = str(error)
        start = find_start(self._config, damaged=self._damaged)
        self._exports.end()
        self.go_on_from(start)
        self._log.metrics.open_writers()
        self._start_export()

    def is_due(self, step: int) -> bool:
        """Whether the completed step gets a checkpoint.

        Every one does where the next update would outlast the grace of a stop signal: it is given
        up then, and its weights are of no step.
        """
        run = self._config.run
        outlasts = 0 < run.grace_s < self._log.expected_s("train") + self.spare_s
        return step >= run.num_steps or outlasts or self._saves.is_due(step)

    @property
    def spare_s(self) -> float:
        """What a save may take, as far as is known."""
        return SAVE_MARGIN * self._saves.longest_s

    def begin(
        self, step: int, write_trainer: WriteTrainer, state: Mapping[str, Any], *, num_bytes: int
    ) -> None:
        """Begin to save a completed step, unless that has been done; none may be under way.

        Args:
            state: what its checkpoint holds beside the trainer's.
            num_bytes: of the trainer's files, about.
        """
        if step == self._saves.step:
            return
        self._exports.collect()
        in_use = self._steps_to_keep() | {state.get(EVALUATING, step)}
        with self._phase("checkpoint"):
            self._saves.begin(step, write_trainer, state, num_bytes=num_bytes, in_use=in_use)

    def settle(self, *, wait: bool = True, last: bool = False) -> None:
        """Take note of the save that is under way, if any.

        Args:
            wait: for it to end; else nothing is done while it is under way.
            last: there is no next step to try again after.

        Raises:
            MegadapoError: it failed, as the one before did, or is the last.
        """
        with self._phase("checkpoint") if wait else nullcontext():
            ended, note = self._saves.ended(wait=wait, last=last)
        if note:
            self._log.note(note)
        if ended is not None:
            self.current = ended
            self._log.status.saved(ended.step)
            forget_before(self._folder, ended.step)
            self._start_export()

    def settle_after_failure(self) -> None:
        """Take note of the save under way; what ended the run is what is to be reported."""
        try:
            self.settle(last=True)
        except MegadapoError as error:
            self._log.note(str(error))

    def join(self) -> None:
        """Wait for the save under way, if any, while there still is a trainer."""
        self._saves.join()

    def finish_exports(self) -> None:
        """Wait for the exports under way; their checkpoints need not be kept any more."""
        if self._exports.steps:
            with self._phase("export"):
                self._exports.wait()
            self._store.prune(self._steps_to_keep())

    def _start_export(self) -> None:
        """Export the present checkpoint where `checkpoint.export_every` asks for its step."""
        every, checkpoint = self._config.checkpoint.export_every, self.current
        if every == 0 or checkpoint is None:
            return
        if checkpoint.step % every == 0 or checkpoint.step >= self._config.run.num_steps:
            self._exports.start(checkpoint.path, checkpoint.step)

    def _steps_to_keep(self) -> frozenset[int]:
        """Steps whose checkpoints are being exported, or were named to go on from."""
        return self._exports.steps | named_steps(self._folder)
