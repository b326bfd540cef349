"""One rank's part of a save: copied to the host at once, written while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megadapo.errors import CheckpointError
from megadapo.trainer.checkpoint.checkpoint import Snapshot, write_snapshot
from megadapo.trainer.checkpoint.save_report import RankReport
from megadapo.weights.disk.hashed_files import Files

WriteOthers = Sequence[Callable[[Path], Files]]
"""What is not a snapshot: each writes something below a folder."""


NICENESS = 15
"""Of the writing thread: while an update wants the core it is on, it gets 3 percent of it."""


class CheckpointWriter:
    """A thread that writes one snapshot after the other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_give_way
        )
        self._pending: Future[RankReport] | None = None
        self.num_begun = 0

    def begin(
        self,
        folder: Path,
        snapshots: dict[str, Snapshot],
        others: WriteOthers,
    ) -> None:
        """Begin to write.

        Args:
            folder: the trainer's, which is there.
            snapshots: by folder below it.
            others: is called after them.

        Raises:
            CheckpointError: the save before is still being written.
        """
        if self._pending is not None and not self._pending.done():
            raise CheckpointError(
                f"trainer rank {self._rank} still writes the save before this one"
            )
        self.num_begun += 1
        self._pending = self._executor.submit(self._write, folder, snapshots, others)

    def report(self, *, wait: bool = False) -> RankReport | None:
        """What became of the save; None while it is being written."""
        assert self._pending is not None, "nothing is being written"
        if not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def _write(
        self,
        folder: Path,
        snapshots: dict[str, Snapshot],
        others: WriteOthers,
    ) -> RankReport:
        report = RankReport()
        try:
            for name, snapshot in snapshots.items():
                files, pieces = write_snapshot(snapshot, folder / name, rank=self._rank)
                report.files |= {str(Path(name) / file): entry for file, entry in files.items()}
                report.pieces[name] = pieces
            for write in others:
                report.files |= write(folder)
        except (OSError, RuntimeError, CheckpointError) as error:
            # torch names a failed write after its own zip writer
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            report.error = f"rank {self._rank}: {cause}"
        return report


def _give_way() -> None:
    """Let this thread have what the others leave; Linux takes the number of a thread here."""
    with contextlib.suppress(PermissionError):  # a sandbox that forbids it must not cost the save
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
