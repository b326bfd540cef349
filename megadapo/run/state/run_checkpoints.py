"""The saves of a run beside its training, and its return to the checkpoint that it resumes from."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from megadapo.config import RunConfig, to_dict
from megadapo.errors import CorruptCheckpointError, InfraError, MegadapoError
from megadapo.rollout.journal.journal import delete_journals_before
from megadapo.run.rollouts import without_samples
from megadapo.run.run_log import RunLog
from megadapo.run.state.checkpoint import (
    CONFIG,
    EVALUATING,
    MODELS,
    SAMPLES,
    Checkpoint,
    Commit,
    WriteTrainer,
)
from megadapo.run.state.resume import (
    ModelFiles,
    ResumePoint,
    checkpoint_store,
    find_resume_point,
    keep_target,
    model_files,
    pinned_steps,
    samples_digest,
)

FAILING_S = 600.0
"""Seconds in which writing a checkpoint or a record may fail before the run ends."""
SAVE_MARGIN = 1.5
"""Factor on the slowest save so far: the time reserved for a save that must finish."""
_LOGGER = logging.getLogger("megadapo.checkpoint")
_VERSIONED = ("megadapo", "torch", "megatron-core", "transformers", "vllm", "ray")


class RunCheckpoints:
    """The checkpoints of one run; one save at a time, beside training."""

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.current: Checkpoint | None = None
        """Checkpoint to resume from."""
        self.models: dict[str, ModelFiles] = {}
        """Files of the models at the start of the run."""
        self._config = config
        self._folder = config.run.folder
        self._log = log
        self._phase = phase
        self._store = checkpoint_store(config)
        self._has_target = False
        """Whether the user named the checkpoint to resume from."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None
        self._saved_step = 0
        """Step of the newest save, complete or pending, or the step resumed from."""
        self._began_at = 0.0
        self._slowest_s = 0.0
        self._failing_since = math.inf
        """Time of the first failed save since one has succeeded."""
        self._num_bytes = 0
        """Approximate size of a checkpoint."""
        self._low_space: str | None = None
        """Warning about the disk that was shown last."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow saves within this block, and complete them on exit.

        After an error only the pending save is completed, and its own failure is only shown.
        """
        try:
            yield
        except BaseException:
            try:
                self.settle(last=True)
            except MegadapoError as error:
                self._log.show(str(error))
            raise
        else:
            self.settle(last=True)
        finally:
            self._executor.shutdown()

    def resume_from(self, point: ResumePoint) -> None:
        """Bring the run's folder to the state it had at `point`."""
        self._store.remove_unfinished()
        checkpoint = point.checkpoint
        dropped = []
        if checkpoint is not None and checkpoint.samples != samples_digest(self._config):
            state = without_samples(checkpoint.state)
            checkpoint = replace(checkpoint, state=state, accepts_other_data=True)
            dropped = ["groups that wait in the checkpoint are dropped: other rules made them"]
        self.current = checkpoint
        step = 0 if checkpoint is None else checkpoint.step
        self._saved_step = step
        self._log.status.update(step=step, checkpoint_step=step, resumed_from=step)
        aside = self._store.set_aside_after(step, damaged=not point.is_target)
        self._has_target = point.is_target
        if checkpoint is not None and point.is_target:
            # written only now, when every newer checkpoint in the folder was trained from this one
            keep_target(self._folder, checkpoint)
        # without a checkpoint no record counts, not even the first evaluation
        self._log.rewind(step if checkpoint is not None else -1)
        self._log.show(*point.messages, *(f"set aside: {path}" for path in aside), *dropped)

    def fall_back(self, error: CorruptCheckpointError) -> None:
        """Resume from the checkpoint before the current one, which proved to be damaged.

        Raise the error again if the user chose this one, CheckpointError if there is no other.
        """
        if self.current is None or self._has_target:
            raise error
        self._store.damaged[self.current.path] = str(error)
        accepts = self.current.accepts_other_data
        point = find_resume_point(self._config, self._store)
        if point.checkpoint is not None:
            earlier = replace(point.checkpoint, accepts_other_data=accepts)
            point = replace(point, checkpoint=earlier)
        self.resume_from(point)
        self._log.metrics.open_writers()

    def is_due(self, step: int) -> bool:
        """Return whether the completed step gets a checkpoint.

        If an update outlasts the grace after a stop signal, every step gets one: the interrupted
        update leaves weights that belong to no step.
        """
        run, every = self._config.run, self._config.checkpoint.every
        if step >= run.num_steps or step % every == 0 or self._failing_since < math.inf:
            return True
        return 0 < run.grace_s < self._log.expected_s("train") + self.reserved_s

    @property
    def reserved_s(self) -> float:
        """Seconds to reserve for a save, from the saves so far."""
        return SAVE_MARGIN * self._slowest_s

    def begin(
        self, step: int, write_trainer: WriteTrainer, state: Mapping[str, Any], *, num_bytes: int
    ) -> None:
        """Begin to save a completed step unless it is saved already; none may be pending.

        An error is raised or shown by the next `settle`. `num_bytes`: approximate size of the
        trainer's files.
        """
        if step == self._saved_step:
            return
        self._num_bytes = num_bytes
        assert self._pending is None, "settle the save before"
        with self._phase("checkpoint"):
            self._saved_step, self._began_at = step, time.monotonic()
            try:
                complete = self._store.begin(step, write_trainer, num_bytes=num_bytes)
            except MegadapoError as error:
                self._pending = Future()
                self._pending.set_exception(error)
            else:
                self._pending = self._executor.submit(self._commit, complete, step, state)

    def settle(self, *, wait: bool = True, last: bool = False) -> None:
        """Show and count the pending save if it has ended.

        Raise InfraError if it failed and is the last, or if all have failed for `FAILING_S`.

        Args:
            wait: whether to wait for its end.
            last: whether no later step can repeat a failed save.
        """
        with self._phase("checkpoint") if wait else nullcontext():
            if self._pending is None or not (wait or self._pending.done()):
                return
            pending, self._pending = self._pending, None
            try:
                self.current = pending.result()
            except MegadapoError as error:
                now, self._saved_step = time.monotonic(), -1
                if last or now - self._failing_since >= FAILING_S:
                    raise InfraError(str(error)) from error
                self._failing_since = min(self._failing_since, now)
                self._log.show(f"{error}; it is tried again after the next step")
                return
        self._failing_since = math.inf
        self._log.status.update(checkpoint_step=self.current.step)
        self._log.send_event("save")
        # the checkpoint is complete, so the rest can wait for the next one
        try:
            low = self._store.low_space(self._num_bytes)
            if low is not None and low != self._low_space:
                self._log.show(low)
            self._low_space = low
            delete_journals_before(self._folder, self.current.step)
        except OSError as error:
            self._log.show(f"{self._folder} fails: {error.strerror}")

    def join(self) -> None:
        """Wait for the pending save, which needs the trainer; `settle` reports its result."""
        if self._pending is not None:
            wait_for([self._pending])

    def _commit(self, complete: Commit, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Complete a checkpoint and delete old ones; runs in the executor's thread."""
        if self.models.keys() != self._config.model_paths.keys():
            # a model of the Hub is known only after its download
            self.models = model_files(self._config) | self.models
        about = _provenance(self._config, policy_version=step)
        checkpoint = complete(state, {**about, MODELS: self.models})
        self._slowest_s = max(self._slowest_s, time.monotonic() - self._began_at)
        try:
            self._store.prune(pinned_steps(self._folder) | {state.get(EVALUATING, step)})
        except (OSError, InfraError) as error:
            _LOGGER.warning("old checkpoints stay until the next save: %s", error)
        return checkpoint


def _provenance(config: RunConfig, *, policy_version: int) -> dict[str, Any]:
    """Return what a manifest records about the program and the run that wrote it."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the trainer's machine may have no vLLM, and an engine's no megatron-core
    return {
        "policy_version": policy_version,
        CONFIG: to_dict(config),
        SAMPLES: samples_digest(config),
        "versions": versions,
    }
