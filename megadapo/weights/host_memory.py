"""Main memory that receives copies of a GPU's tensors again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 30
ALIGNMENT = 64


class HostMemory:
    """Blocks of main memory, allocated once and reused, since it takes seconds to pin them."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._used: list[int] = []
        """Bytes of each block that are taken."""

    def take(self, size: int) -> Tensor:
        """Return `size` free bytes as a tensor with a storage of its own."""
        fitting = (
            number
            for number, block in enumerate(self._blocks)
            if self._used[number] + size <= len(block)
        )
        number = next(fitting, len(self._blocks))
        if number == len(self._blocks):
            # torch rounds pinned memory up to a power of two: smaller copies use the rest
            length = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
            block = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned)
            self._blocks.append(block)
            self._used.append(0)
        start = self._used[number]
        self._used[number] = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        # torch.save would write the whole block with a view of it
        return torch.from_numpy(self._blocks[number].numpy()[start : start + size])

    def reset(self) -> None:
        """Mark all bytes as free."""
        self._used = [0] * len(self._blocks)

    @contextmanager
    def copying(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that starts to copy a tensor into free bytes; wait for all on exit.

        The copies are on a stream of their own, beside other work on the device.
        """
        if not self._pinned:
            yield self._copy
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

        def copy(tensor: Tensor) -> Tensor:
            with torch.cuda.stream(stream):
                return self._copy(tensor)

        yield copy
        stream.synchronize()

    def _copy(self, tensor: Tensor) -> Tensor:
        target = self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor, non_blocking=True)
