"""The driver's side of a save: wait until all ranks have written, then write the metadata."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.errors import CheckpointError, InfraError
from megadapo.weights.disk.files import Files

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megadapo.weights.disk.torch_checkpoint import StoredPiece

POLL_S = 0.1
"""Seconds between two questions whether a save is written."""
LONGEST_WORK_S = 7 * 24 * 3600.0
"""Time limit of calls that a heartbeat watches."""


@dataclass
class RankReport:
    """Outcome of a save on one rank."""

    files: Files = field(default_factory=dict)
    pieces: dict[str, list[StoredPiece]] = field(default_factory=dict)
    """Folder relative to the trainer's -> pieces written there."""
    error: str = ""


def wait_for_save(
    ranks: Sequence[ActorHandle[Any]],
    names: Sequence[str],
    logs: Sequence[Path],
    folder: Path,
    *,
    deadline: float,
    watch: Callable[[], None],
) -> Files:
    """Ask the ranks until all have written; return all files of the checkpoint.

    Args:
        ranks: writing ranks, which may have ended meanwhile.
        deadline: on the monotonic clock, when every rank must have written.
        watch: raises if a rank hangs.

    Raises:
        CheckpointError: a rank could not write; no rank is writing any more.
        InfraError: a rank is gone, or still writing at the deadline.
    """
    reports: dict[int, RankReport] = {}
    while True:
        missing = [number for number in range(len(ranks)) if number not in reports]
        answers: list[RankReport | None] = gather(
            [ranks[number].save_report.remote() for number in missing],
            names=[names[number] for number in missing],
            doing="save",
            logs=[logs[number] for number in missing],
            # a rank answers between other work
            timeout_s=LONGEST_WORK_S,
            watch=watch,
        )
        reports |= {n: report for n, report in zip(missing, answers, strict=True) if report}
        if len(reports) == len(ranks):
            return complete_save(folder, list(reports.values()))
        if time.monotonic() > deadline:
            late = ", ".join(str(number) for number in missing if number not in reports)
            raise InfraError(
                f"trainer ranks {late} are still writing to {folder}: is it reachable?"
            )
        time.sleep(POLL_S)


def complete_save(folder: Path, reports: Sequence[RankReport]) -> Files:
    """Write the metadata of all pieces into `folder`; return all files of the checkpoint.

    Raises:
        CheckpointError: a rank could not write, or a piece was written twice or not at all.
        OSError: the metadata could not be written.
    """
    # it imports torch, which the driver does not need before a save
    from megadapo.weights.disk.torch_checkpoint import write_metadata

    if errors := [report.error for report in reports if report.error]:
        raise CheckpointError("; ".join(errors))
    files: Files = {}
    for report in reports:
        if twice := files.keys() & report.files.keys():
            raise CheckpointError(f"{folder / min(twice)} was written by two ranks")
        files |= report.files
    for name in reports[0].pieces:
        pieces = (piece for report in reports for piece in report.pieces[name])
        written = write_metadata(folder / name, pieces)
        files |= {str(Path(name) / file): entry for file, entry in written.items()}
    return files
