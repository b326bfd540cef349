"""A trainer's part of a checkpoint, with the files that a test writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megadapo.run.state.checkpoint import WriteTrainer
from megadapo.weights.disk.files import Files, entry_of


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
