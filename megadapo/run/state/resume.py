"""The choice of the checkpoint that a run resumes from."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.config.recipe import RESUME_TARGET_FILE
from megadapo.errors import CheckpointError, DataError
from megadapo.observe.files import replace_text
from megadapo.run.state.checkpoint import Checkpoint, load
from megadapo.run.state.checkpoint_store import CHECKPOINTS, CheckpointStore
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
