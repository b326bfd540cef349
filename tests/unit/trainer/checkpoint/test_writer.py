"""A rank's part of a checkpoint: its boxes, and the thread that writes it."""

import os
import random
import threading
from collections.abc import Callable
from math import prod
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megadapo.errors import CheckpointError
from megadapo.run.processes import GpuSharing
from megadapo.run.step.training import TrainerState
from megadapo.trainer.checkpoint.checkpoint import NICENESS, CheckpointWriter, Snapshot
from megadapo.trainer.checkpoint.pieces import boxes
from megadapo.trainer.trainer import Trainer
from megadapo.weights.disk.files import check_files
from megadapo.weights.disk.torch_checkpoint import StoredPiece, StoredTensors, write_metadata


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


def test_boxes_of_a_run_are_its_elements_in_order():
    """A run begins and ends anywhere: within a row, an expert, a layer."""
    draws = random.Random(0)
    for _ in range(500):
        shape = [draws.randint(1, 4) for _ in range(draws.randint(1, 4))]
        start = draws.randint(0, prod(shape))
        stop = draws.randint(start, prod(shape))
        whole, found = np.arange(prod(shape)).reshape(shape), list(boxes(shape, start, stop))
        values = [
            whole[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))].ravel()
            for offset, sizes in found
        ]
        assert [v for box in values for v in box] == list(range(start, stop)), (shape, start, stop)
        assert len(found) <= 2 * len(shape) - 1


def piece(offset: int, size: int) -> StoredPiece:
    return StoredPiece("weight", torch.float32, (10,), (offset,), (size,), "__0_0.distcp", 0, 1)


def test_missing_or_doubled_pieces_are_refused(tmp_path):
    """This happens if ranks disagree about who writes which piece."""
    files = write_metadata(tmp_path, [piece(0, 4), piece(4, 6)])
    assert files.keys() == {".metadata", "metadata.json", "common.pt", "extra_state.distcp"}
    check_files(tmp_path, files)
    assert list(StoredTensors(tmp_path).tensors) == ["weight"]
    for pieces in ([piece(0, 4)], [piece(0, 4), piece(4, 6), piece(4, 6)]):
        with pytest.raises(CheckpointError, match="of 10 values of weight"):
            write_metadata(tmp_path, pieces)
    for pieces in ([piece(0, 5), piece(0, 5)], [piece(0, 5), piece(3, 5)]):
        with pytest.raises(CheckpointError, match="of weight were written twice"):
            write_metadata(tmp_path, pieces)
    with pytest.raises(CheckpointError, match="9 of 10 values"):
        write_metadata(tmp_path, [piece(0, 4), piece(5, 6)])
