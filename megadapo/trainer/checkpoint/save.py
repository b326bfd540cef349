"""What the ranks say of a save, and what makes one whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megadapo.errors import CheckpointError
from megadapo.weights.disk.files import Files
from megadapo.weights.disk.torch_checkpoint import METADATA_FILE, StoredPiece, write_metadata


@dataclass
class RankReport:
    """What one rank has written, or why it has not."""

    files: Files = field(default_factory=dict)
    pieces: dict[str, list[StoredPiece]] = field(default_factory=dict)
    """By the folder below the trainer's."""
    error: str = ""


def complete_save(folder: Path, reports: Sequence[RankReport]) -> Files:
    """Say in `folder` where all ranks have put everything; returns all files there should be.

    Raises:
        CheckpointError: a rank could not write, or something was written twice or not at all.
        OSError: the metadata could not be written.
    """
    if errors := [report.error for report in reports if report.error]:
        raise CheckpointError("; ".join(errors))
    files: Files = {}
    for report in reports:
        if twice := files.keys() & report.files.keys():
            raise CheckpointError(f"{folder / min(twice)} was written by two ranks")
        files |= report.files
    for name in reports[0].pieces:
        pieces = (piece for report in reports for piece in report.pieces[name])
        files[str(Path(name) / METADATA_FILE)] = write_metadata(folder / name, pieces)
    return files
