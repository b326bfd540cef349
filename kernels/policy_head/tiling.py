"""What the policy head decides before it multiplies: its blocks and its vocabulary shards.

The same inputs give the same plan on every tensor-parallel rank and for every tensor-parallel
size, and in the pass that makes old log-probs as in the update: equal shapes give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megadapo.kernels.policy_head.exchange import (
    Block,
    ReplicatedRows,
    RowExchange,
    ShardedRows,
    process_group_rank,
    process_group_size,
)
from megadapo.kernels.policy_head.inputs import (
    RowSelection,
    check_operands,
    check_temperature,
    check_token_tensor,
    select_rows,
)
from megadapo.kernels.policy_head.tiles import PolicyInputs, Tile, VocabShards

NUM_VIRTUAL_SHARDS = 8
"""Vocabulary shards, whatever the tensor-parallel size: divisible by TP 1, 2, 4 and 8."""
SMALLEST_VIRTUAL_SHARD = 64
"""Columns below which a rank has one shard: a product of a few columns is all overhead."""

FP32_BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 24 << 20}
"""Size of the reused buffer with fp32 hidden states: a block's logits, then their gradient."""
BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 32 << 20}
"""Size of the reused buffer for a block's gradient of the logits in a low-precision dtype."""
TILE_BYTES = {"cuda": 3 << 29, "cpu": 16 << 20}
"""Size of the fp32 logits beside it, which are made for a part of the block at a time."""

_ROW_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How the head is called, whatever the objective; see `policy_head_loss`."""

    temperature: float
    process_group: dist.ProcessGroup | None
    vocab_size: int | None
    chunk_tokens: int | None
    rows: Tensor | None
    sequence_parallel: bool
    check_inputs: bool


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Rows are computed in blocks (one d_hidden and d_weight product each) of tiles (one logits
    product and one row pass each)."""

    block_rows: int
    tile_rows: int

    def blocks(self, num_rows: int) -> list[Block]:
        """Cut rows 0 to num_rows into blocks of equal size."""
        return _cut(num_rows, self.block_rows)

    def tiles(self, num_rows: int) -> list[Block]:
        """Cut one block's rows into tiles of equal size."""
        return _cut(num_rows, self.tile_rows)


def _cut(num_rows: int, largest: int) -> list[Block]:
    if num_rows == 0:
        return []
    count = -(-num_rows // largest)
    size = -(-num_rows // count)
    size = min(largest, -(-size // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


@dataclass(frozen=True, kw_only=True)
class HeadCall:
    """What both passes over the blocks need, fixed before the first product."""

    targets: Tensor  # [R] int64
    selection: RowSelection
    num_tokens: int
    tiling: Tiling
    shards: VocabShards
    temperature: float
    process_group: dist.ProcessGroup | None
    sequence_parallel: bool

    def tile(self, logits: Tensor, rows: slice) -> Tile:
        """Some of the selected rows and their logits, for the row passes."""
        return Tile(
            logits=logits,
            targets=self.targets[rows],
            shards=self.shards,
            temperature=self.temperature,
        )

    def take(self, values: Tensor) -> Tensor:
        """The selected tokens' values of [T], fp32 [R]."""
        return self.selection.take(values).float().contiguous()

    def spread(self, values: Tensor) -> Tensor:
        """Put per-row values back at their tokens [T], 0 elsewhere."""
        return self.selection.spread(values, self.num_tokens)

    @property
    def num_rows(self) -> int:
        return self.selection.num_rows

    def blocks(self) -> list[Block]:
        """The rows of each block, in order."""
        return self.tiling.blocks(self.num_rows)

    def exchange(self, hidden: Tensor) -> RowExchange:
        """How this call's rows reach the rank; one pass over the blocks each."""
        rows = self.selection.rows
        if self.sequence_parallel and process_group_size(self.process_group) > 1:
            assert self.process_group is not None
            return ShardedRows(
                hidden, rows, self.selection.counts, self.blocks(), self.process_group
            )
        return ReplicatedRows(hidden, rows, self.process_group)


def plan_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    inputs: PolicyInputs | None = None,
) -> HeadCall:
    """Check the arguments and fix rows, blocks and shards; the same on every rank.

    Without `rows` in the options, tokens without a loss weight are left out.
    """
    tp = process_group_size(options.process_group)
    num_tokens = check_operands(
        hidden, weight, targets, tp=tp, sequence_parallel=options.sequence_parallel
    )
    check_temperature(options.temperature)
    for name, value in ({} if inputs is None else vars(inputs)).items():
        if value is not None:
            check_token_tensor(name, value, num_tokens, hidden.device)
    shards = plan_shards(weight, options.process_group, options.vocab_size)
    selection = select_rows(
        targets,
        vocab_size=shards.vocab_size,
        num_parts=tp if options.sequence_parallel else 1,
        rows=options.rows,
        inputs=inputs,
        check_inputs=options.check_inputs,
    )
    padded_vocab = shards.size * shards.num_total
    return HeadCall(
        targets=selection.take(targets).long().contiguous(),
        selection=selection,
        num_tokens=num_tokens,
        tiling=plan_tiling(padded_vocab, hidden.dtype, hidden.device, options.chunk_tokens),
        shards=shards,
        temperature=float(options.temperature),
        process_group=options.process_group if tp > 1 else None,
        sequence_parallel=options.sequence_parallel,
    )


def plan_tiling(
    padded_vocab: int, dtype: torch.dtype, device: torch.device, chunk_tokens: int | None
) -> Tiling:
    """Choose block and tile heights from the whole vocabulary, so that TP does not change them."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    is_fp32 = dtype == torch.float32
    block_bytes = (FP32_BLOCK_BYTES if is_fp32 else BLOCK_BYTES)[kind]
    block = chunk_tokens
    if block is None:
        block = _fitting_rows(block_bytes, dtype.itemsize * padded_vocab)
    if block < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {block}")
    tile = block if is_fp32 else _fitting_rows(TILE_BYTES[kind], 4 * padded_vocab)
    return Tiling(block_rows=block, tile_rows=min(block, tile))


def _fitting_rows(budget: int, row_bytes: int) -> int:
    return max(_ROW_MULTIPLE, budget // row_bytes // _ROW_MULTIPLE * _ROW_MULTIPLE)


def plan_shards(
    weight: Tensor,
    process_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> VocabShards:
    """Cut the vocabulary so that the tensor-parallel size changes no bit, wherever that can be."""
    tp, rank = process_group_size(process_group), process_group_rank(process_group)
    columns = weight.shape[0]
    padded = columns * tp
    vocab_size = padded if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= padded:
        raise ValueError(
            f"vocab_size {vocab_size} is not in 1..{padded}, the rows of weight over {tp} ranks"
        )
    divides = NUM_VIRTUAL_SHARDS % tp == 0 and columns % (NUM_VIRTUAL_SHARDS // tp) == 0
    is_invariant = divides and padded >= NUM_VIRTUAL_SHARDS * SMALLEST_VIRTUAL_SHARD
    num_local = NUM_VIRTUAL_SHARDS // tp if is_invariant else 1
    return VocabShards(
        size=columns // num_local,
        num_local=num_local,
        num_total=num_local * tp,
        first=num_local * rank,
        vocab_size=vocab_size,
    )
