"""Boxes of flat runs, and what makes a whole of them: a lost or doubled value is a wrong model."""

import random
from math import prod

import numpy as np
import pytest
import torch

from megadapo.errors import CheckpointError
from megadapo.trainer.checkpoint.pieces import boxes
from megadapo.weights.disk.files import check_files
from megadapo.weights.disk.torch_checkpoint import StoredPiece, StoredTensors, write_metadata


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
