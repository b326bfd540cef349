"""The checkpoints of a run: which one it resumes from, which ones it writes and keeps."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig, to_dict
from megadapo.config.recipe import RESUME_TARGET_FILE
from megadapo.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DataError,
    InfraError,
    MegadapoError,
)
from megadapo.observe.files import replace_text
from megadapo.rollout.journal.journal import delete_journals_before
from megadapo.run.rollouts import without_samples
from megadapo.run.run_log import RunLog
from megadapo.run.state.checkpoint import (
    CONFIG,
    EVALUATING,
    MODELS,
    SAMPLES,
    Checkpoint,
    OpenCheckpoint,
    WriteTrainer,
    load,
    not_written,
)
from megadapo.run.state.checkpoint_store import CHECKPOINTS, CheckpointStore
from megadapo.run.state.config_diff import samples_digest
from megadapo.run.state.model_files import ModelFiles, model_files
from megadapo.run.state.status import STATUS_FILE, read_status


@dataclass(frozen=True)
class ResumeTarget:
    """The checkpoint that `run.resume` names by path.

    The run's folder keeps it, so that the same command started again resumes from newer ones.
    """

    path: str
    step: int

    @classmethod
    def read(cls, folder: Path) -> ResumeTarget | None:
        """Return the last target of the run in `folder`, None if there was none."""
        try:
            return cls(**json.loads((folder / RESUME_TARGET_FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, TypeError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        """Write the target into the run's folder."""
        replace_text(folder / RESUME_TARGET_FILE, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run starts or resumes."""

    checkpoint: Checkpoint | None
    messages: list[str]
    """Lines that explain the choice to the user."""
    target: ResumeTarget | None = None
    """The checkpoint if the user named it; no other may replace it."""


def pinned_steps(folder: Path) -> frozenset[int]:
    """Return the step of the run's own checkpoint that was a target, if there is one.

    A job that is queued again names it again, so it is never pruned.
    """
    target = ResumeTarget.read(folder)
    is_own = target is not None and Path(target.path).parent == (folder / CHECKPOINTS).resolve()
    return frozenset([target.step] if target is not None and is_own else [])


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Return the store of the run's checkpoints."""
    return CheckpointStore(config.run.folder / CHECKPOINTS, keep=config.checkpoint.keep)


def find_resume_point(config: RunConfig, store: CheckpointStore) -> ResumePoint:
    """Return the point in the run's store that `run.resume` asks for.

    A path is used once: as soon as the run has a newer checkpoint, the path means the newest.
    """
    if config.run.resume in ("auto", "never"):
        return ResumePoint(*find_checkpoint(config, store))
    target = ResumeTarget.read(config.run.folder)
    path = str(Path(config.run.resume).resolve())
    if target is not None and target.path == path:
        later, skipped = store.newest_after(target.step)
        messages = [f"skipped: {line}" for line in skipped]
        if later is not None:
            messages.append(
                f"resuming after step {later.step} from {later.path}: the run has resumed from "
                f"{path} before and written newer checkpoints; to return there, delete "
                f"{config.run.folder / RESUME_TARGET_FILE}"
            )
            return ResumePoint(later, messages)
    checkpoint, messages = find_checkpoint(config, store)
    assert checkpoint is not None, "a path is a checkpoint or an error"
    return ResumePoint(checkpoint, messages, ResumeTarget(path, checkpoint.step))


def _recorded_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that the run's status names, 0 without one."""
    with suppress(DataError):
        return read_status(folder).checkpoint_step
    return 0


def find_checkpoint(
    config: RunConfig, store: CheckpointStore
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that `run.resume` asks for, and messages for the user.

    The ranks hash the trainer's files when they load them. They are hashed here only if later
    checkpoints must be set aside for this one.

    Raises:
        CheckpointError: it does not exist, "never" would mix two runs in one folder, or the run had
            checkpoints and has none.
        InfraError: the folder cannot be read.
    """
    if config.run.resume == "auto":
        checkpoint, skipped = store.newest(hashes=False)
        messages = [f"skipped: {line}" for line in skipped]
        if checkpoint is None and (saved := _recorded_step(config.run.folder)):
            raise CheckpointError(
                f"{config.run.folder / STATUS_FILE} says that step {saved} was saved, but "
                f"{store.folder} has no checkpoint: is its disk mounted here? To start over from "
                'step 0 in this folder, set run.resume = "never"'
            )
    elif config.run.resume == "never":
        if store.steps():
            raise CheckpointError(
                f'{store.folder} already holds checkpoints and run.resume is "never": choose '
                "another run.folder, or delete this one"
            )
        checkpoint, messages = None, []
    else:
        path = Path(config.run.resume)
        if not path.is_dir():
            raise CheckpointError(f"run.resume = {path}: there is no such checkpoint folder")
        # a link stands for the folder that it points to
        checkpoint, messages = load(path.resolve(), hashes=False), []
        if any(step > checkpoint.step for step in store.steps()):
            # the ranks find damage only after later checkpoints are set aside
            load(checkpoint.path)
    if checkpoint is not None:
        messages.append(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    return checkpoint, messages


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
        self._target: ResumeTarget | None = None
        """Checkpoint that the user chose, if the run resumed from it."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None
        self._saved_step = 0
        """Step of the newest save, complete or pending, or the step resumed from."""
        self._began_at = 0.0
        """Time at which the newest save began."""
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
        aside = self._store.set_aside_after(step, damaged=point.target is None)
        self._target = point.target
        if point.target is not None:
            # written only now, when every newer checkpoint in the folder was trained from this one
            point.target.write(self._folder)
        # without a checkpoint no record counts, not even the first evaluation
        self._log.rewind(step if checkpoint is not None else -1)
        self._log.show(*point.messages, *(f"set aside: {path}" for path in aside), *dropped)

    def fall_back(self, error: CorruptCheckpointError) -> None:
        """Resume from the checkpoint before the current one, which proved to be damaged.

        Raises:
            CheckpointError: there is no other, or the user chose this one.
        """
        if self.current is None or self._target is not None:
            raise error
        self._store.damaged[self.current.path] = str(error)
        point = find_resume_point(self._config, self._store)
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

        An error is raised or shown by the next `settle`.

        Args:
            state: the run's state beside the trainer's.
            num_bytes: approximate size of the trainer's files.
        """
        if step == self._saved_step:
            return
        self._num_bytes = num_bytes
        assert self._pending is None, "settle the save before"
        with self._phase("checkpoint"):
            self._saved_step, self._began_at = step, time.monotonic()
            try:
                in_use = pinned_steps(self._folder) | {state.get(EVALUATING, step)}
                begun = self._store.begin(step, write_trainer, num_bytes=num_bytes)
            except OSError as error:
                failure: MegadapoError = not_written(step, self._store.folder, error)
            except MegadapoError as error:
                failure = error
            else:
                self._pending = self._executor.submit(self._commit, begun, state, in_use)
                return
            self._pending = Future()
            self._pending.set_exception(failure)

    def settle(self, *, wait: bool = True, last: bool = False) -> None:
        """Show and count the pending save if it has ended.

        Args:
            wait: whether to wait for its end.
            last: whether no later step can repeat a failed save.

        Raises:
            InfraError: the save failed, and it is the last, or all have failed for `FAILING_S`.
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

    def _commit(
        self, begun: OpenCheckpoint, state: Mapping[str, Any], in_use: Collection[int]
    ) -> Checkpoint:
        """Complete a checkpoint and delete old ones; runs in the executor's thread."""
        if self.models.keys() != self._config.model_paths.keys():
            # a model of the Hub is known only after its download
            self.models = model_files(self._config) | self.models
        about = _provenance(self._config, policy_version=begun.step)
        checkpoint = begun.commit(state, {**about, MODELS: self.models})
        self._slowest_s = max(self._slowest_s, time.monotonic() - self._began_at)
        try:
            self._store.prune(in_use)
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
