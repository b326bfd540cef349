"""Blocks of main memory for copies of a GPU's tensors."""

from __future__ import annotations

import io
from unittest import mock

import pytest
import torch

from megadapo.weights.host_memory import BLOCK_BYTES, HostMemory

SIZES = [1, 63, BLOCK_BYTES - 64, 100, BLOCK_BYTES + 1, 7]


def test_host_memory_does_not_overlap_and_is_reused():
    memory = HostMemory(pinned=False)
    pieces = [memory.take(size) for size in SIZES]
    assert [len(piece) for piece in pieces] == SIZES
    places = sorted((piece.data_ptr(), len(piece)) for piece in pieces)
    ends = [start + size for start, size in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert all(start % 64 == 0 for start, _ in places)
    memory.reset()
    assert [memory.take(size).data_ptr() for size in SIZES] == [one.data_ptr() for one in pieces]


def test_rest_of_a_rounded_block_is_used():
    """Catches up to twice the pinned memory for matrices a little above a block."""
    memory = HostMemory(pinned=False)
    first = memory.take(BLOCK_BYTES + 1)
    second, third = (memory.take(BLOCK_BYTES // 2) for _ in range(2))
    # the next multiple of 64
    assert second.data_ptr() - first.data_ptr() == BLOCK_BYTES + 64
    assert not 0 <= third.data_ptr() - first.data_ptr() < 2 * BLOCK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_is_written_alone(dtype):
    """Catches a file with the whole block of each piece."""
    values = torch.arange(6, dtype=dtype).view(2, 3)
    with HostMemory(pinned=False).copying() as copy:
        copies = [copy(one) for one in (values, values[:0], -values)]
    for one, expected in zip(copies, (values, values[:0], -values), strict=True):
        assert one.dtype == dtype and one.equal(expected)
        assert one.untyped_storage().nbytes() == expected.nbytes
        file = io.BytesIO()
        torch.save(one, file)
        assert len(file.getvalue()) < 4096


def test_pinned_copies_are_on_a_stream_of_their_own_and_waited_for_once():
    """Catches a wait for each tensor, copies of values that are still computed, and no wait."""
    calls, empty, put = mock.MagicMock(), torch.empty, torch.Tensor.copy_

    def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(size, dtype=dtype)

    def start(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        calls.start(non_blocking)
        return put(target, source)

    streams = {"Stream": lambda: calls, "current_stream": lambda: "now", "stream": calls.on}
    values = torch.arange(6.0)
    with (
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch.multiple(torch, empty=pinned),
        mock.patch.object(torch.Tensor, "copy_", start),
        HostMemory(pinned=True).copying() as copy,
    ):
        copies = [copy(values), copy(values + 1)]
        calls.other_work()
    assert [one.tolist() for one in copies] == [[*range(6)], [*range(1, 7)]]
    of_one = ["on", "on().__enter__", "start", "on().__exit__"]
    names = [name for name, _, _ in calls.mock_calls]
    assert names == ["wait_stream", *of_one, *of_one, "other_work", "synchronize"]
    calls.start.assert_called_with(True)
