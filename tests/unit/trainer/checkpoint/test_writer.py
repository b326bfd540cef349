"""The thread that writes a rank's part of a checkpoint."""

import os
import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from megadapo.errors import CheckpointError
from megadapo.run.processes import GpuSharing
from megadapo.run.step.training import TrainerState
from megadapo.trainer.checkpoint.checkpoint import NICENESS, CheckpointWriter, Snapshot
from megadapo.trainer.trainer import Trainer


class _NoPieces(list):
    """The pieces of an empty snapshot, whose reader calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._function = function

    def __len__(self) -> int:
        self._function()
        return 0


def begin(writer: CheckpointWriter, folder, function: Callable[[], object]) -> None:
    """Begin a save in whose thread the function is called."""
    writer.begin(folder, {"": Snapshot(_NoPieces(function), 0, 0, "")})


def test_only_the_writing_thread_has_low_priority(tmp_path):
    """A write would take the core from the update beside it, or training from everything else."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def write() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    writer = CheckpointWriter(0)
    begin(writer, tmp_path, write)
    report = writer.report(wait=True)
    assert report is not None and not report.error
    assert found == [NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_late_save_postpones_the_next(tmp_path):
    """Ranks that were still writing to a slow disk were killed when the next save began."""
    writer, written = CheckpointWriter(0), threading.Event()
    begin(writer, tmp_path, lambda: written.wait(20))
    assert writer.report() is None and writer.is_writing
    trainer = Mock(spec=Trainer)
    trainer.call_all.return_value = [False, writer.is_writing]
    with pytest.raises(CheckpointError, match="are still writing"):
        TrainerState(trainer, GpuSharing(trainer)).begin_save(tmp_path)
    trainer.call_all.assert_called_once_with("is_writing")
    trainer.begin_save.assert_not_called()
    written.set()
    assert writer.report(wait=True) is not None and not writer.is_writing


def test_error_of_the_writing_thread_is_reported(tmp_path):
    """It ended the rank instead of the save."""

    def write() -> None:
        raise CheckpointError("differs from the trained weights")

    writer = CheckpointWriter(3)
    begin(writer, tmp_path, write)
    report = writer.report(wait=True)
    assert report is not None and report.error == "rank 3: differs from the trained weights"
