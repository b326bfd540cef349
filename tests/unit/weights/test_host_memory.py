"""Blocks of main memory for copies of a GPU's tensors."""

from __future__ import annotations

import io
from typing import Any
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
    seen: list[str] = []

    class Stream:
        def wait_stream(self, other: str) -> None:
            seen.append(f"wait for {other}")

        def synchronize(self) -> None:
            seen.append("synchronize")

    class Within:
        def __init__(self, stream: Stream) -> None: ...

        def __enter__(self) -> None:
            seen.append("in")

        def __exit__(self, *raised: object) -> None:
            seen.append("out")

    empty, put = torch.empty, torch.Tensor.copy_
    pins = []

    def allocate(*size: int, pin_memory: bool, dtype: torch.dtype) -> torch.Tensor:
        pins.append(pin_memory)
        return empty(*size, dtype=dtype)

    def record(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        seen.append("start" if non_blocking else "copy")
        return put(target, source)

    values = torch.arange(6.0)
    stand_ins: dict[str, Any] = {
        "torch.cuda.Stream": Stream,
        "torch.cuda.current_stream": lambda: "current",
        "torch.cuda.stream": Within,
        "torch.empty": allocate,
    }
    with mock.patch("torch.Tensor.copy_", record):
        for name, stand_in in stand_ins.items():
            mock.patch(name, stand_in).start()
        try:
            with HostMemory(pinned=True).copying() as copy:
                copies = [copy(values), copy(values + 1)]
                seen.append("hash")
        finally:
            mock.patch.stopall()
    assert pins == [True] and [one.tolist() for one in copies] == [[*range(6)], [*range(1, 7)]]
    expected = ["wait for current", *["in", "start", "out"] * 2, "hash", "synchronize"]
    assert seen == expected
