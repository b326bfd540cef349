"""Where a run's checkpoints are, and which of them it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import CheckpointError
from megadapo.run.checkpoint import CHECKPOINTS, Checkpoint, CheckpointStore, load


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Where the run that `config` describes has its checkpoints."""
    section = config.checkpoint
    folder = config.run.folder / CHECKPOINTS
    return CheckpointStore(folder, keep=section.keep, keep_every=section.keep_every)


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
        checkpoint, notes = load(Path(config.run.resume), hashes=False), []
    if checkpoint is not None:
        notes.append(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    return checkpoint, notes
