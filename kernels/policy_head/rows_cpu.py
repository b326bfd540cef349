"""Row passes of the policy head on a CPU: C if there is a compiler, else torch.

Both read a tile twice and store nothing in it between the passes, as the Triton kernels do. A row
has the same bits in every tile, on any number of threads and at every tensor-parallel size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.kernels.cpu.native import address, integers, load_native
from megadapo.kernels.launch import count_bytes
from megadapo.kernels.policy_head.tiles import MASKED_LOGIT, NUM_STATS, Tile
from megadapo.kernels.torch_internals import profiled_range

SOURCE = Path(__file__).parents[1] / "cpu" / "policy_head_rows.c"

ROW_STATS, ROW_GRADS = "megadapo::row_stats", "megadapo::row_grads"
"""Names of the C passes in a profile."""

SMALLEST = -87.0
"""Value of log p if p is 0, so that p * log p is 0."""

_SCRATCH_BYTES = 4 << 20
"""Size of a group of rows in the torch passes, which stays in the last-level cache."""


@dataclass(frozen=True, kw_only=True)
class RowGradients:
    """Terms of d_logits = d_logprob (onehot - p) - d_entropy p (log p + entropy), each [R]."""

    maximum: Tensor
    log_total: Tensor
    """Log of the sum of e^(z - maximum)."""
    entropy: Tensor
    d_logprobs: Tensor
    d_entropy: Tensor | None


def row_stats_cpu(tile: Tile) -> Tensor:
    """Return the tile's stats [S/p, 5, R]; see tiles.NUM_STATS."""
    _check(tile)
    native = load_native(SOURCE)
    if native is None:
        return _row_stats_torch(tile)
    logits, shards = tile.logits, tile.shards
    stats = torch.empty(shards.num_local, NUM_STATS, tile.num_rows, dtype=torch.float32)
    count_bytes(ROW_STATS, logits)
    with profiled_range(ROW_STATS):
        native.megadapo_row_stats(
            address(logits),
            *integers(logits.stride(0), tile.num_rows, shards.num_local, shards.size),
            *integers(shards.num_valid_columns),
            ctypes.c_float(tile.inverse_temperature),
            address(tile.targets),
            *integers(shards.start),
            address(stats),
            torch.get_num_threads(),
        )
    return stats


def row_grads_cpu(tile: Tile, terms: RowGradients, d_logits: Tensor) -> None:
    """Write `d_logits` [R, V/p], which may be the tile's logits; they are overwritten in any case.

    A row without a gradient gets zeros, also if its logits are not finite.
    """
    _check(tile)
    logits, shards = tile.logits, tile.shards
    assert d_logits.stride(1) == 1 and d_logits.shape == logits.shape
    native = load_native(SOURCE)
    if native is None:
        _row_grads_torch(tile, terms, d_logits)
        return
    is_bf16 = d_logits.dtype == torch.bfloat16
    out = d_logits if is_bf16 or d_logits.dtype == torch.float32 else logits
    values = [terms.maximum, terms.log_total, terms.entropy, terms.d_logprobs, terms.d_entropy]
    values = [None if value is None else value.contiguous() for value in values]
    count_bytes(ROW_GRADS, logits, out)
    with profiled_range(ROW_GRADS):
        native.megadapo_row_grads(
            address(logits),
            *integers(logits.stride(0), *logits.shape, shards.num_valid_columns),
            ctypes.c_float(tile.inverse_temperature),
            *map(address, values),
            address(tile.targets),
            *integers(shards.start),
            address(out),
            *integers(out.stride(0)),
            int(is_bf16),
            torch.get_num_threads(),
        )
    if out is not d_logits:
        d_logits.copy_(out)


def _check(tile: Tile) -> None:
    """Assert the dtypes and strides that the C passes assume."""
    logits, targets = tile.logits, tile.targets
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, logits.dtype
    assert targets.dtype == torch.int64 and targets.is_contiguous(), targets.dtype


def _row_groups(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Return groups of rows that fit the cache, of at least two rows each if there are two.

    torch splits a sum with a single result over its threads, which would change its bits.
    """
    size = max(2, _SCRATCH_BYTES // (4 * num_columns))
    starts = list(range(0, num_rows, size))
    if len(starts) > 1 and num_rows - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], num_rows], strict=True))


def _row_stats_torch(tile: Tile) -> Tensor:
    logits, shards, num_rows = tile.logits, tile.shards, tile.num_rows
    columns, is_here = _local_targets(tile)
    target_logits = logits.gather(1, columns[:, None])[:, 0] * tile.inverse_temperature
    holder = torch.where(is_here, columns // shards.size, -1)
    stats = torch.empty(shards.num_local, NUM_STATS, num_rows, dtype=torch.float32)
    for shard in range(shards.num_local):
        stats[shard, 2] = torch.where(holder == shard, target_logits, MASKED_LOGIT)
    for start, stop in _row_groups(num_rows, logits.shape[1]):
        z = logits[start:stop] * tile.inverse_temperature
        z[:, shards.num_valid_columns :] = MASKED_LOGIT
        z = z.view(-1, shards.num_local, shards.size)
        maximum = z.amax(-1, keepdim=True)
        z -= maximum
        powers = z.exp()
        z.clamp_(min=SMALLEST)
        stats[:, 0, start:stop] = maximum[..., 0].t()
        stats[:, 1, start:stop] = _sum_last(powers).t()
        rows = torch.where(is_here[start:stop], columns[start:stop], -1)
        others = powers.flatten(1).square()
        others[rows >= 0, rows[rows >= 0]] = 0.0
        stats[:, 4, start:stop] = _sum_last(others.view_as(powers)).t()
        stats[:, 3, start:stop] = _sum_last(powers.mul_(z)).t()
    return stats


def _sum_last(x: Tensor) -> Tensor:
    """Return the sum of [r, S, n] over n, [r, S], with the same bits for every r and S."""
    if x.shape[0] * x.shape[1] == 1:
        # torch splits the sum of a single result over threads, but not two results
        return x.expand(2, -1, -1).sum(-1)[:1]
    return x.sum(-1)


def _row_grads_torch(tile: Tile, terms: RowGradients, d_logits: Tensor) -> None:
    logits, temperature = tile.logits, tile.temperature
    columns, is_here = _local_targets(tile)
    d_entropy = torch.zeros_like(terms.d_logprobs) if terms.d_entropy is None else terms.d_entropy
    has_gradient = (terms.d_logprobs != 0) | (d_entropy != 0)
    onehot = torch.where(is_here, terms.d_logprobs / temperature, 0.0)
    slope = -d_entropy / temperature
    constant = slope * terms.entropy - terms.d_logprobs / temperature
    for start, stop in _row_groups(*logits.shape):
        rows = slice(start, stop)
        log_p = logits[rows] * tile.inverse_temperature
        log_p -= terms.maximum[rows, None]
        log_p -= terms.log_total[rows, None]
        grads = log_p.exp()
        if terms.d_entropy is None:
            grads *= constant[rows, None]
        else:
            log_p.clamp_(min=SMALLEST)
            grads *= log_p.mul_(slope[rows, None]).add_(constant[rows, None])
        grads[:, tile.shards.num_valid_columns :] = 0.0
        grads.scatter_add_(1, columns[rows, None], onehot[rows, None])
        d_logits[rows] = grads.masked_fill_(~has_gradient[rows, None], 0.0)


def _local_targets(tile: Tile) -> tuple[Tensor, Tensor]:
    """Return (local column clamped into range, whether this rank holds the target), each [R]."""
    local = tile.targets - tile.shards.start
    is_here = (local >= 0) & (local < tile.shards.num_columns)
    return local.clamp(0, tile.shards.num_columns - 1), is_here
