"""A trainer's part of a checkpoint, with the files that a test writes."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megadapo.run.state.checkpoint import Checkpoint, CheckpointStore, WriteTrainer
from megadapo.weights.disk.files import Files, entry_of


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    write_trainer: WriteTrainer,
    state: Mapping[str, Any],
    in_use: Collection[int] = (),
) -> Checkpoint:
    """Write and commit the checkpoint of a step, then prune old ones, as a run does."""
    checkpoint = store.begin(step, write_trainer)(state, {})
    store.prune(in_use)
    return checkpoint


def written_by(write: Callable[[Path], object]) -> WriteTrainer:
    """`write` fills the folder; all that it leaves there is reported."""

    def begin(folder: Path) -> Callable[[], Files]:
        write(folder)
        return lambda: {
            str(path.relative_to(folder)): entry_of(path)
            for path in folder.rglob("*")
            if path.is_file()
        }

    return begin


write_shard = written_by(lambda folder: (folder / "shard").write_bytes(b"shard"))
"""Writes one file, named shard."""


def saved_store(
    folder: Path, *steps: int, keep: int = 9, write: WriteTrainer = write_shard, **state: object
) -> CheckpointStore:
    """Return a store of the checkpoints of some steps, all with one state."""
    store = CheckpointStore(folder, keep=keep)
    for step in steps:
        save_checkpoint(store, step, write, state)
    return store
