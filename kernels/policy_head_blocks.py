"""The policy head's passes over its blocks of tokens: three products each, rows in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head_exchange import Block, RowExchange, gather_stats
from megadapo.kernels.policy_head_main_grad import main_grad_of
from megadapo.kernels.policy_head_plan import HeadCall
from megadapo.kernels.policy_head_products import Fp32Sum, mm_fp32, mm_rows, widened_like
from megadapo.kernels.policy_head_rows import logprob_grad_rows, policy_rows, row_stats
from megadapo.kernels.policy_head_types import PolicyInputs, RowOutputs, Tile, VocabShards

_ROW_ALIGNMENT = 16
"""Elements that a row of the buffers is rounded up to."""


@dataclass(frozen=True, kw_only=True)
class PolicyCall:
    """A `HeadCall` whose gradient is known in the forward pass."""

    head: HeadCall
    inputs: PolicyInputs  # [R]
    objective: PolicyObjective


def _aligned_rows(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory whose rows begin at multiples of 32 bytes: an odd vocabulary's rows
    would slow the products down."""
    padded = -(-num_columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return like.new_empty(num_rows, padded, dtype=dtype)[:, :num_columns]


class _Buffers:
    """The two reused buffers: a tile of fp32 logits and a block of their gradient.

    With fp32 hidden states both are the same memory: a tile's gradient overwrites its logits.
    """

    def __init__(self, call: HeadCall, like: Tensor, *, for_grad: bool) -> None:
        blocks = call.blocks()
        block_rows = max((stop - start for start, stop in blocks), default=0)
        tile_rows = max((b - a for a, b in call.tiling.tiles(block_rows)), default=0)
        columns = call.shards.num_columns
        self._grads: Tensor | None = None
        if for_grad:
            self._grads = _aligned_rows(like, block_rows, columns, like.dtype)
        self._logits: Tensor | None = None
        if not for_grad or like.dtype != torch.float32:
            self._logits = _aligned_rows(like, tile_rows, columns, torch.float32)

    def logits(self, tile: Block) -> Tensor:
        if self._logits is not None:
            return self._logits[: tile[1] - tile[0]]
        return self.grads(tile)

    def drop_logits(self) -> None:
        """Free the tile's own memory."""
        self._logits = None

    def grads(self, rows: Block) -> Tensor:
        assert self._grads is not None
        return self._grads[rows[0] : rows[1]]


class _Projection:
    """Logits of a tile: one product per vocabulary shard, so that TP does not change their bits."""

    def __init__(self, weight: Tensor, shards: VocabShards) -> None:
        self._shards = [
            weight[shard * shards.size : (shard + 1) * shards.size]
            for shard in range(shards.num_local)
        ]
        self._widened = widened_like(self._shards[0])

    def drop_scratch(self) -> None:
        """Free the memory that shards are widened in; there is no call after this one."""
        self._widened = None

    def __call__(self, hidden: Tensor, out: Tensor) -> None:
        if self._widened is not None:
            hidden = hidden.float()
        for shard, columns in zip(self._shards, out.chunk(len(self._shards), dim=1), strict=True):
            mm_fp32(hidden, shard, out=columns, scratch=self._widened)


def policy_blocks(
    hidden: Tensor, weight: Tensor, call: PolicyCall, *, wants_hidden: bool, wants_weight: bool
) -> tuple[RowOutputs, Tensor | None, Tensor | None]:
    """Run every block; return per-row outputs and the gradients of a loss whose scale is 1."""
    head = call.head
    wants_grad = wants_hidden or wants_weight
    outputs = RowOutputs.empty(head.num_rows, hidden.device)
    buffers = _Buffers(head, hidden, for_grad=wants_grad)
    project = _Projection(weight, head.shards)
    exchange = head.exchange(hidden)
    d_weight = Fp32Sum(weight.shape, weight) if wants_weight else None
    for block in head.blocks():
        rows = exchange.fetch(block)
        for tile in head.tiling.tiles(block[1] - block[0]):
            project(rows[tile[0] : tile[1]], buffers.logits(tile))
            _policy_tile(block[0], tile, buffers, call, outputs, wants_grad=wants_grad)
        if wants_grad:
            if block[1] == head.num_rows:
                # their memory is as large as the weight's gradient, which is made next
                buffers.drop_logits()
                project.drop_scratch()
            d_logits = buffers.grads((0, block[1] - block[0]))
            _block_products(block, rows, weight, d_logits, exchange, wants_hidden, d_weight)
    return (
        outputs,
        exchange.finish() if wants_hidden else None,
        d_weight.result() if d_weight is not None else None,
    )


def _policy_tile(
    offset: int,
    rows: Block,
    buffers: _Buffers,
    call: PolicyCall,
    outputs: RowOutputs,
    *,
    wants_grad: bool,
) -> None:
    """The two row passes over one tile, whose first row is row `offset` + rows[0] of all."""
    head = call.head
    first, last = offset + rows[0], offset + rows[1]
    tile = head.tile(buffers.logits(rows), first, last)
    policy_rows(
        tile,
        gather_stats(row_stats(tile), head.process_group),
        call.inputs.rows(first, last),
        call.objective,
        outputs.rows(first, last),
        buffers.grads(rows) if wants_grad else None,
    )


def _block_products(
    block: Block,
    rows: Tensor,
    weight: Tensor,
    d_logits: Tensor,
    exchange: RowExchange,
    wants_hidden: bool,
    d_weight: Fp32Sum | None,
) -> None:
    """The two backward products of a block; the first one's reduction runs under the second."""
    if wants_hidden:
        mm_rows(d_logits, weight, out=exchange.slot(block))
        exchange.send(block)
    if d_weight is not None:
        d_weight.add(d_logits, rows)


def logits_by_tile(hidden: Tensor, weight: Tensor, call: HeadCall) -> Iterator[tuple[slice, Tile]]:
    """Yield every tile and its rows among all; the logits lie in one reused buffer."""
    buffers = _Buffers(call, hidden, for_grad=False)
    project = _Projection(weight, call.shards)
    exchange = call.exchange(hidden)
    for block in call.blocks():
        rows = exchange.fetch(block)
        for tile in call.tiling.tiles(block[1] - block[0]):
            logits = buffers.logits(tile)
            project(rows[tile[0] : tile[1]], logits)
            first, last = block[0] + tile[0], block[0] + tile[1]
            yield slice(first, last), call.tile(logits, first, last)


def logprob_grad_blocks(
    hidden: Tensor,
    weight: Tensor,
    stats: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    call: HeadCall,
    *,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The recomputing backward pass: a fourth product and no collective for the statistics."""
    buffers = _Buffers(call, hidden, for_grad=True)
    project = _Projection(weight, call.shards)
    exchange = call.exchange(hidden)
    d_weight = Fp32Sum(weight.shape, weight, main_grad_of(weight)) if wants_weight else None
    for block in call.blocks():
        rows = exchange.fetch(block)
        for tile in call.tiling.tiles(block[1] - block[0]):
            first, last = block[0] + tile[0], block[0] + tile[1]
            logits = buffers.logits(tile)
            project(rows[tile[0] : tile[1]], logits)
            logprob_grad_rows(
                call.tile(logits, first, last),
                stats[:, :, first:last].contiguous(),
                d_logprobs=d_logprobs[first:last],
                d_entropy=None if d_entropy is None else d_entropy[first:last],
                d_logits=buffers.grads(tile),
            )
        d_logits = buffers.grads((0, block[1] - block[0]))
        _block_products(block, rows, weight, d_logits, exchange, wants_hidden, d_weight)
    return (
        exchange.finish() if wants_hidden else None,
        d_weight.result() if d_weight is not None else None,
    )
