"""Exchange of hidden rows and their gradients between tensor-parallel ranks, block by block.

Rows are the tokens that enter the head, in order. Each block is fetched once, in order; its
gradient is written to `slot` and then sent. Without sequence parallelism every rank has all
rows and the gradient is all-reduced. With it each rank owns a contiguous part of the sequence: a
block's rows are broadcast by their owners while the block before is computed, and its gradient is
reduced to the owners while the block after is computed. Blocks have the same rows either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

RowRange = tuple[int, int]
"""(start, stop) of a block among the selected rows, or of a tile among its block's rows."""


def process_group_size(process_group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the tensor-parallel group; None: 1."""
    return 1 if process_group is None else dist.get_world_size(process_group)


def process_group_rank(process_group: dist.ProcessGroup | None) -> int:
    return 0 if process_group is None else dist.get_rank(process_group)


def gather_stats(stats: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Gather stats [S/p, 5, R] of every rank into [S, 5, R], shards in global order."""
    size = process_group_size(process_group)
    if size == 1:
        return stats
    every = stats.new_empty(size * stats.shape[0], *stats.shape[1:])
    dist.all_gather_into_tensor(every, stats, group=process_group)
    return every


class ReplicatedRows:
    """Exchange for ranks that all have hidden [T, H]; `rows` [R] selects, None: all rows."""

    def __init__(
        self, hidden: Tensor, rows: Tensor | None, process_group: dist.ProcessGroup | None
    ) -> None:
        self._hidden = hidden
        self._rows = rows
        self._process_group = process_group if process_group_size(process_group) > 1 else None
        self._grad: Tensor | None = None
        self._pending: list[dist.Work] = []

    def fetch(self, block: RowRange) -> Tensor:
        if self._rows is None:
            return self._hidden[block[0] : block[1]]
        return self._hidden.index_select(0, self._rows[block[0] : block[1]])

    def slot(self, block: RowRange) -> Tensor:
        if self._grad is None:
            num_rows = self._hidden.shape[0] if self._rows is None else self._rows.shape[0]
            self._grad = self._hidden.new_empty(num_rows, self._hidden.shape[1])
        return self._grad[block[0] : block[1]]

    def send(self, block: RowRange) -> None:
        if self._process_group is not None:
            work = dist.all_reduce(self.slot(block), group=self._process_group, async_op=True)
            self._pending.append(work)

    def finish(self) -> Tensor:
        for work in self._pending:
            work.wait()
        return _spread(self._grad, self._rows, self._hidden)


@dataclass(frozen=True)
class _SharedSegment:
    """Rows of one block that one rank owns: `start:stop` within the block."""

    owner: int
    start: int
    stop: int


class ShardedRows:
    """Exchange for ranks that each have hidden [T/p, H], their part of the sequence.

    `rows` [R] are the selected rows of the whole sequence; `counts` is how many of them each rank
    owns. `blocks` are fetched in this order on every rank.
    """

    def __init__(
        self,
        hidden: Tensor,
        rows: Tensor | None,
        counts: Sequence[int],
        blocks: Sequence[RowRange],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._hidden = hidden
        self._process_group = process_group
        self._rank = process_group_rank(process_group)
        self._blocks = list(blocks)
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        self._edges = edges
        self._own: Tensor | None = None
        if rows is not None:
            own = rows[edges[self._rank] : edges[self._rank + 1]]
            self._own = own - self._rank * hidden.shape[0]
        self._num_started = 0
        self._arriving: dict[RowRange, tuple[Tensor, list[dist.Work]]] = {}
        self._leaving: dict[RowRange, tuple[Tensor, list[dist.Work]]] = {}
        self._grad: Tensor | None = None

    def fetch(self, block: RowRange) -> Tensor:
        # the next block is on its way while this one is computed
        while self._num_started < min(len(self._blocks), self._blocks.index(block) + 2):
            self._start_broadcast(self._blocks[self._num_started])
            self._num_started += 1
        tensor, works = self._arriving.pop(block)
        for work in works:
            work.wait()
        return tensor

    def slot(self, block: RowRange) -> Tensor:
        if block not in self._leaving:
            grad = self._hidden.new_empty(block[1] - block[0], self._hidden.shape[1])
            self._leaving[block] = (grad, [])
        return self._leaving[block][0]

    def send(self, block: RowRange) -> None:
        grad, works = self._leaving[block]
        for segment in self._segments(block):
            owner = dist.get_global_rank(self._process_group, segment.owner)
            part = grad[segment.start : segment.stop]
            works.append(dist.reduce(part, owner, group=self._process_group, async_op=True))
        for earlier in [b for b in self._leaving if b != block]:
            self._receive_grad(earlier)

    def finish(self) -> Tensor:
        for block in list(self._leaving):
            self._receive_grad(block)
        return _spread(self._grad, self._own, self._hidden)

    def _segments(self, block: RowRange) -> list[_SharedSegment]:
        segments = []
        for owner, (low, high) in enumerate(zip(self._edges, self._edges[1:], strict=False)):
            start, stop = max(low, block[0]), min(high, block[1])
            if start < stop:
                segments.append(_SharedSegment(owner, start - block[0], stop - block[0]))
        return segments

    def _own_rows(self, block: RowRange, segment: _SharedSegment) -> slice:
        """Return the segment's range among this rank's own selected rows."""
        first = block[0] - self._edges[self._rank]
        return slice(first + segment.start, first + segment.stop)

    def _start_broadcast(self, block: RowRange) -> None:
        tensor = self._hidden.new_empty(block[1] - block[0], self._hidden.shape[1])
        works = []
        for segment in self._segments(block):
            part = tensor[segment.start : segment.stop]
            if segment.owner == self._rank:
                own = self._own_rows(block, segment)
                if self._own is None:
                    part.copy_(self._hidden[own])
                else:
                    torch.index_select(self._hidden, 0, self._own[own], out=part)
            owner = dist.get_global_rank(self._process_group, segment.owner)
            works.append(dist.broadcast(part, owner, group=self._process_group, async_op=True))
        self._arriving[block] = (tensor, works)

    def _receive_grad(self, block: RowRange) -> None:
        grad, works = self._leaving.pop(block)
        for work in works:
            work.wait()
        if self._grad is None:
            num_rows = self._edges[self._rank + 1] - self._edges[self._rank]
            self._grad = self._hidden.new_empty(num_rows, self._hidden.shape[1])
        for segment in self._segments(block):
            if segment.owner == self._rank:
                own = self._own_rows(block, segment)
                self._grad[own] = grad[segment.start : segment.stop]


RowExchange = ReplicatedRows | ShardedRows


def _spread(grad: Tensor | None, rows: Tensor | None, hidden: Tensor) -> Tensor:
    """Put the selected rows' gradients into a tensor of hidden's shape, zeros elsewhere."""
    if grad is None:
        return torch.zeros_like(hidden)
    if rows is None:
        return grad
    return torch.zeros_like(hidden).index_copy_(0, rows, grad)
