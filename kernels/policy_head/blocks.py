"""Passes of the policy head over its blocks of tokens: products, and row passes in between.

A row is one token's logits over this rank's part of the vocabulary, cut into equal shards in
global order. `row_stats` reads a tile once and returns five numbers per row and shard. Merged over
all shards in a fixed order they give the log-sum-exp, so the result does not depend on how shards
are spread over ranks. `policy_rows` and `logprob_rows` turn them into log-probs and entropy and
overwrite the tile with its gradient. CUDA runs Triton, the CPU compiled C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.launch import uses_triton
from megadapo.kernels.policy_head.exchange import RowRange, gather_stats
from megadapo.kernels.policy_head.products import Fp32Sum, mm_fp32, mm_fp32_scratch, mm_rows
from megadapo.kernels.policy_head.rows_cpu import RowGradients, row_grads_cpu, row_stats_cpu
from megadapo.kernels.policy_head.rows_triton import (
    logprob_grad_rows_triton,
    logprob_rows_triton,
    policy_rows_triton,
    row_stats_triton,
)
from megadapo.kernels.policy_head.terms import DROPPED, policy_terms
from megadapo.kernels.policy_head.tiles import (
    NUM_STATS,
    PolicyInputs,
    RowOutputs,
    Tile,
    VocabShards,
)
from megadapo.kernels.policy_head.tiling import HeadCall
from megadapo.kernels.torch_internals import profiled_range

_ROW_ALIGNMENT = 16
"""Multiple of elements to which a row of the buffers is padded."""
TilePass = Callable[[slice, Tile, Tensor | None], None]
"""Row pass over a tile: (the tile's rows among all rows, the tile, its d_logits if wanted)."""


class MergedStats(NamedTuple):
    """Statistics of whole rows, each fp32 [R]."""

    maximum: Tensor
    log_total: Tensor
    """Log of the sum of e^(z - maximum)."""
    logprobs: Tensor
    entropy: Tensor
    distance: Tensor
    """||onehot(target) - p||."""


def merge_stats(stats: Tensor) -> MergedStats:
    """Merge stats [S, 5, R] over the shards, in order."""
    shard_max, shard_sum, shard_target, shard_weighted, shard_squares = stats.unbind(1)  # [S, R]
    maximum = shard_max.amax(0)
    gap = shard_max - maximum
    scale = gap.exp()
    total = _sum_in_order(scale * shard_sum)
    weighted = _sum_in_order(scale * (shard_weighted + gap * shard_sum))
    squares = _sum_in_order(scale.square() * shard_squares)
    log_total = total.log()
    logprobs = (shard_target.amax(0) - maximum) - log_total
    return MergedStats(
        maximum=maximum,
        log_total=log_total,
        logprobs=logprobs,
        entropy=log_total - weighted / total,
        distance=(torch.expm1(logprobs).square() + squares / total.square()).sqrt(),
    )


def _sum_in_order(values: Tensor) -> Tensor:
    """Return the sum of [S, R] over S; the order of sum(0) would depend on the number of rows."""
    total = torch.zeros_like(values[0])
    for value in values.unbind(0):
        total = total + value
    return total


def row_stats(tile: Tile) -> Tensor:
    """Return the tile's stats [shards.num_local, 5, R]; see NUM_STATS."""
    return row_stats_triton(tile) if uses_triton(tile.logits) else row_stats_cpu(tile)


def policy_rows(
    tile: Tile,
    stats: Tensor,
    inputs: PolicyInputs,
    objective: PolicyObjective,
    outputs: RowOutputs,
    d_logits: Tensor | None,
) -> None:
    """Fill `outputs` from merged stats [S, 5, R] and write dloss/dlogits into `d_logits`.

    `d_logits` [R, V/p] may be the tile's logits themselves; None: no gradient.
    """
    if uses_triton(tile.logits):
        policy_rows_triton(tile, stats, inputs, objective, outputs, d_logits)
        return
    merged = merge_stats(stats)
    terms = policy_terms(merged.logprobs, merged.entropy, inputs, objective)
    outputs.logprobs.copy_(merged.logprobs)
    outputs.entropy.copy_(merged.entropy)
    outputs.distance.copy_(merged.distance)
    outputs.loss.copy_(terms.loss)
    outputs.d_policy.copy_(terms.d_policy)
    outputs.ratio.copy_(terms.ratio)
    outputs.flags.copy_(terms.flags)
    if d_logits is not None:
        d_entropy = None
        if objective.entropy_coef != 0.0:
            kept = terms.flags.lt(DROPPED)
            d_entropy = -objective.entropy_coef * inputs.loss_weights * kept
        gradients = RowGradients(
            maximum=merged.maximum,
            log_total=merged.log_total,
            entropy=merged.entropy,
            d_logprobs=inputs.loss_weights * terms.d_logprobs,
            d_entropy=d_entropy,
        )
        row_grads_cpu(tile, gradients, d_logits)


def logprob_rows(tile: Tile, stats: Tensor, outputs: Tensor) -> None:
    """Fill log-probs, entropy and distance, fp32 [3, R], from merged stats [S, 5, R]."""
    if uses_triton(tile.logits):
        logprob_rows_triton(tile, stats, *outputs)
        return
    merged = merge_stats(stats)
    torch.stack([merged.logprobs, merged.entropy, merged.distance], out=outputs)


def logprob_grad_rows(
    tile: Tile,
    stats: Tensor,
    *,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    d_logits: Tensor,
) -> None:
    """Write d_logits [R, V/p] for gradients of log-probs and entropy, each fp32 [R].

    The tile's logits are recomputed; `stats` are the merged stats of the forward pass.
    """
    if uses_triton(tile.logits):
        logprob_grad_rows_triton(tile, stats, d_logprobs, d_entropy, d_logits)
        return
    merged = merge_stats(stats)
    gradients = RowGradients(
        maximum=merged.maximum,
        log_total=merged.log_total,
        entropy=merged.entropy,
        d_logprobs=d_logprobs,
        d_entropy=d_entropy,
    )
    row_grads_cpu(tile, gradients, d_logits)


def _aligned_rows(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory with rows aligned to 32 bytes: unaligned rows slow products."""
    padded = -(-num_columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return like.new_empty(num_rows, padded, dtype=dtype)[:, :num_columns]


class _Buffers:
    """Two reused buffers: a tile of fp32 logits and a block of their gradient.

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

    def logits(self, tile: RowRange) -> Tensor:
        if self._logits is not None:
            return self._logits[: tile[1] - tile[0]]
        return self.grads(tile)

    def drop_logits(self) -> None:
        """Free the memory of the logits if the gradient does not use it too."""
        self._logits = None

    def grads(self, rows: RowRange) -> Tensor:
        assert self._grads is not None
        return self._grads[rows[0] : rows[1]]


class _Projection:
    """Logits of a tile: one product per vocabulary shard, see `HeadOptions.tp_invariant`."""

    def __init__(self, weight: Tensor, shards: VocabShards) -> None:
        self._shards = [
            weight[shard * shards.size : (shard + 1) * shards.size]
            for shard in range(shards.num_local)
        ]
        self._widened = mm_fp32_scratch(self._shards[0])

    def drop_scratch(self) -> None:
        """Free the memory of widened shards; there must be no later call."""
        self._widened = None

    def __call__(self, hidden: Tensor, out: Tensor) -> None:
        if self._widened is not None:
            hidden = hidden.float()
        for shard, columns in zip(self._shards, out.chunk(len(self._shards), dim=1), strict=True):
            mm_fp32(hidden, shard, out=columns, scratch=self._widened)


class _Pass:
    """One pass over all blocks: logits, the row pass, and the two products of the gradient."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        call: HeadCall,
        *,
        wants_hidden: bool = False,
        wants_weight: bool = False,
        into: Tensor | None = None,
    ) -> None:
        self._call = call
        self._weight = weight
        self._wants_hidden = wants_hidden
        self._d_weight = Fp32Sum(weight.shape, weight, into) if wants_weight else None
        self._wants_grad = wants_hidden or wants_weight
        self._buffers = _Buffers(call, hidden, for_grad=self._wants_grad)
        self._project = _Projection(weight, call.shards)
        self._exchange = call.exchange(hidden)

    def run(self, step: TilePass) -> tuple[Tensor | None, Tensor | None]:
        """Call `step` on every tile; return d_hidden and d_weight, each None if not wanted."""
        for block in self._call.blocks():
            rows = self._exchange.fetch(block)
            for tile in self._call.tiling.tiles(block[1] - block[0]):
                self._run_tile(block[0], tile, rows, step)
            if self._wants_grad:
                self._multiply_back(block, rows)
        return (
            self._exchange.finish() if self._wants_hidden else None,
            self._d_weight.result() if self._d_weight is not None else None,
        )

    def _run_tile(self, offset: int, tile: RowRange, rows: Tensor, step: TilePass) -> None:
        """Run one tile; its first row is row `offset` + tile[0] among all rows."""
        logits = self._buffers.logits(tile)
        with profiled_range("megadapo::head logits"):
            self._project(rows[tile[0] : tile[1]], logits)
        chosen = slice(offset + tile[0], offset + tile[1])
        d_logits = self._buffers.grads(tile) if self._wants_grad else None
        with profiled_range("megadapo::head rows"):
            step(chosen, self._call.tile(logits, chosen), d_logits)

    def _multiply_back(self, block: RowRange, rows: Tensor) -> None:
        """Run the two products of a block's gradient; d_hidden's reduction overlaps the second."""
        if block[1] == self._call.num_rows:
            # this memory is as large as the weight's gradient, which is allocated next
            self._buffers.drop_logits()
            self._project.drop_scratch()
        d_logits = self._buffers.grads((0, block[1] - block[0]))
        if self._wants_hidden:
            with profiled_range("megadapo::head d_hidden"):
                mm_rows(d_logits, self._weight, out=self._exchange.slot(block))
            self._exchange.send(block)
        if self._d_weight is not None:
            with profiled_range("megadapo::head d_weight"):
                self._d_weight.add(d_logits, rows)


def policy_blocks(
    hidden: Tensor,
    weight: Tensor,
    call: HeadCall,
    inputs: PolicyInputs,
    objective: PolicyObjective,
    *,
    wants_hidden: bool,
    wants_weight: bool,
    into: Tensor | None,
) -> tuple[RowOutputs, Tensor | None, Tensor | None]:
    """Return per-row outputs, and d_hidden and d_weight for a loss with gradient 1.

    Args:
        inputs: [R], the values of the rows that enter the head.
        into: tensor to which d_weight is added, and which is returned; None: a new one.
    """
    outputs = RowOutputs.empty(call.num_rows, hidden.device)

    def step(rows: slice, tile: Tile, d_logits: Tensor | None) -> None:
        stats = gather_stats(row_stats(tile), call.process_group)
        policy_rows(tile, stats, inputs.rows(rows), objective, outputs.rows(rows), d_logits)

    all_blocks = _Pass(
        hidden, weight, call, wants_hidden=wants_hidden, wants_weight=wants_weight, into=into
    )
    return outputs, *all_blocks.run(step)


def logprob_blocks(hidden: Tensor, weight: Tensor, call: HeadCall) -> tuple[Tensor, Tensor]:
    """Return log-probs, entropy and distance [3, R], and their merged stats [S, 5, R]."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=hidden.device)

    outputs = empty(3, call.num_rows)
    stats = empty(call.shards.num_total, NUM_STATS, call.num_rows)

    def step(rows: slice, tile: Tile, _: Tensor | None) -> None:
        merged = gather_stats(row_stats(tile), call.process_group)
        stats[:, :, rows] = merged
        logprob_rows(tile, merged, outputs[:, rows])

    _Pass(hidden, weight, call).run(step)
    return outputs, stats


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
    """Return d_hidden and d_weight from recomputed logits; stats need no collective again.

    The weight's gradient is added to main_grad if the parameter has one.
    """

    def step(rows: slice, tile: Tile, d_logits: Tensor | None) -> None:
        assert d_logits is not None
        logprob_grad_rows(
            tile,
            stats[:, :, rows].contiguous(),
            d_logprobs=d_logprobs[rows],
            d_entropy=None if d_entropy is None else d_entropy[rows],
            d_logits=d_logits,
        )

    all_blocks = _Pass(
        hidden,
        weight,
        call,
        wants_hidden=wants_hidden,
        wants_weight=wants_weight,
        into=getattr(weight, "main_grad", None),
    )
    return all_blocks.run(step)
