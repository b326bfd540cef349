"""Where a run's checkpoints are, and which of them it goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.config.recipe import NAMED_FILE
from megadapo.errors import CheckpointError
from megadapo.observe.files import replace_text
from megadapo.run.state.checkpoint import CHECKPOINTS, Checkpoint, CheckpointStore, load


@dataclass(frozen=True)
class Named:
    """The checkpoint that a run was told to go on from; kept in its folder, as that is said once
    however often the same command is started again."""

    path: str
    step: int

    @classmethod
    def read(cls, folder: Path) -> Named | None:
        """What was named last for the run in a folder; None: nothing was."""
        try:
            return cls(**json.loads((folder / NAMED_FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, TypeError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        """Put it in the run's folder.

        Raises:
            InfraError: the disk refuses.
        """
        replace_text(folder / NAMED_FILE, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    checkpoint: Checkpoint | None
    notes: list[str]
    """What to tell the user about the choice."""
    named: Named | None = None
    """The checkpoint, where the user names it: no other one takes its place."""


def named_steps(folder: Path) -> frozenset[int]:
    """The step of the checkpoint that was named last, where it is one of the run's own: it stays,
    as a job that is queued again names it again."""
    named = Named.read(folder)
    is_own = named is not None and Path(named.path).parent == (folder / CHECKPOINTS).resolve()
    return frozenset([named.step] if named is not None and is_own else [])


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Where the run that `config` describes has its checkpoints."""
    section = config.checkpoint
    folder = config.run.folder / CHECKPOINTS
    return CheckpointStore(folder, keep=section.keep, keep_every=section.keep_every)


def find_start(config: RunConfig, *, damaged: Mapping[Path, str] | None = None) -> Start:
    """Where the run that `config` describes goes on.

    That is what `run.resume` asks for. A path is where it goes on once: as soon as the run has a
    later checkpoint, the same path means the newest.

    `damaged`: checkpoints that cannot be used, and why.

    Raises:
        CheckpointError: there is none, or "never" would mix two runs in one folder.
    """
    if config.run.resume in ("auto", "never"):
        return Start(*find_checkpoint(config, damaged=damaged))
    named = Named.read(config.run.folder)
    path = str(Path(config.run.resume).resolve())
    if named is not None and named.path == path:
        later, skipped = checkpoint_store(config).newest_after(named.step, damaged=damaged)
        notes = [f"skipped: {line}" for line in skipped]
        if later is not None:
            notes.append(
                f"resuming after step {later.step} from {later.path}: the run has been told before "
                f"to go on from {path}, and has done so; to go back there once more, delete "
                f"{config.run.folder / NAMED_FILE}"
            )
            return Start(later, notes)
    checkpoint, notes = find_checkpoint(config)
    assert checkpoint is not None, "a path is a checkpoint or an error"
    return Start(checkpoint, notes, Named(path, checkpoint.step))


def find_checkpoint(
    config: RunConfig, *, damaged: Mapping[Path, str] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint `run.resume` asks for, and what to tell the user about the choice.

    The trainer's files are compared with their hashes by the ranks that load them.

    `damaged`: checkpoints that cannot be used, and why.

    Raises:
        CheckpointError: there is none, or "never" would mix two runs in one folder.
    """
    store = checkpoint_store(config)
    if config.run.resume == "auto":
        checkpoint, skipped = store.newest(hashes=False, damaged=damaged)
        notes = [f"skipped: {line}" for line in skipped]
    elif config.run.resume == "never":
        if store.steps():
            raise CheckpointError(
                f'{store.folder} already holds checkpoints and run.resume is "never": choose '
                "another run.folder, or delete this one"
            )
        checkpoint, notes = None, []
    else:
        path = Path(config.run.resume)
        if not path.is_dir():
            raise CheckpointError(f"run.resume = {path}: there is no such checkpoint folder")
        # whoever names a link means what it leads to
        checkpoint, notes = load(path.resolve(), hashes=False), []
    if checkpoint is not None:
        notes.append(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    return checkpoint, notes
