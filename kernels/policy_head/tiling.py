"""Decisions of the policy head before its first product: rows, tiling and vocabulary shards.

The same inputs give the same tiling on every tensor-parallel rank and for every tensor-parallel
size, in the pass that makes old log-probs as in the update: equal shapes give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megadapo.kernels.policy_head.exchange import (
    ReplicatedRows,
    RowExchange,
    RowRange,
    ShardedRows,
    process_group_rank,
    process_group_size,
)
from megadapo.kernels.policy_head.tiles import PolicyInputs, Tile, VocabShards

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_VIRTUAL_SHARDS = 8
"""Vocabulary shards for any tensor-parallel size that divides it: 1, 2, 4 and 8."""
SMALLEST_VIRTUAL_SHARD = 64
"""Columns below which a rank has one shard: a product of a few columns is all overhead."""
FP32_BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 24 << 20}
"""Size of the reused buffer with fp32 hidden states: a block's logits, then their gradient."""
BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 32 << 20}
"""Size of the reused buffer for a block's gradient of the logits in a low-precision dtype."""
TILE_BYTES = {"cuda": 3 << 29, "cpu": 16 << 20}
"""Size of the fp32 logits beside it, which hold a part of the block at a time."""
_ROW_MULTIPLE = {"cuda": 128, "cpu": 64}
"""Rows of a product's tile."""
_TILE_COLUMNS = 256
"""Columns of a product's tile on CUDA."""
_TILES_PER_WAVE = 132
"""Multiprocessors of an H100 or H200. A constant, so that no card changes the tiling."""


@dataclass(frozen=True, kw_only=True)
class RowSelection:
    """The tokens that enter the head. `rows` None: all tokens, in place."""

    rows: Tensor | None
    num_rows: int
    counts: tuple[int, ...]
    """Number of rows in each tensor-parallel rank's part of the sequence."""


def check_operands(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, tp: int, sequence_parallel: bool
) -> int:
    """Return the number of tokens T; raise ValueError if shapes, dtypes or devices do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, H] and weight [V/p, H]; got {_shape(hidden)} and {_shape(weight)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in _FLOAT_DTYPES:
        raise ValueError(
            "hidden and weight must both be float32, bfloat16 or float16; "
            f"got {hidden.dtype} and {weight.dtype}"
        )
    num_tokens = hidden.shape[0] * (tp if sequence_parallel else 1)
    check_token_tensor("targets", targets, num_tokens, hidden.device)
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"weight is on {weight.device}, hidden on {hidden.device}")
    return num_tokens


def check_token_tensor(name: str, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise ValueError for a per-token tensor of another length or device."""
    if tensor.shape != (num_tokens,):
        raise ValueError(f"{name} must be [T] with T = {num_tokens}, got {_shape(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {device}")


def select_rows(
    targets: Tensor,
    *,
    vocab_size: int,
    num_parts: int,
    rows: Tensor | None,
    inputs: PolicyInputs | None,
    check_inputs: bool,
) -> RowSelection:
    """Select `rows`, or else the tokens with a loss weight, and check their values.

    All counts reach the host in one copy. With `rows` given, one part and `check_inputs` off the
    host does not wait for the device.

    Raises:
        ValueError: targets are outside the vocabulary, or values are not finite.
    """
    num_tokens = targets.shape[0]
    if rows is not None and num_parts == 1 and not check_inputs:
        return RowSelection(rows=rows, num_rows=rows.shape[0], counts=(rows.shape[0],))
    chosen = _chosen(targets, rows, inputs)
    problems = _problems(chosen, targets, vocab_size, inputs) if check_inputs else {}
    totals = torch.cat(
        [chosen.view(num_parts, -1).sum(1), *(bad.sum()[None] for bad in problems.values())]
    ).tolist()
    for problem, count in zip(problems, totals[num_parts:], strict=True):
        if count:
            raise ValueError(problem.format(count))
    counts = tuple(totals[:num_parts])
    num_rows = sum(counts)
    if num_rows == num_tokens:
        return RowSelection(rows=None, num_rows=num_rows, counts=counts)
    if rows is None:
        rows = torch.nonzero_static(chosen, size=num_rows)[:, 0]
    return RowSelection(rows=rows, num_rows=num_rows, counts=counts)


def _chosen(targets: Tensor, rows: Tensor | None, inputs: PolicyInputs | None) -> Tensor:
    """Return whether each token enters the head, bool [T]."""
    if rows is not None:
        chosen = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
        return chosen.index_fill_(0, rows, True)
    if inputs is None:
        return torch.ones(targets.shape, dtype=torch.bool, device=targets.device)
    return inputs.loss_weights != 0


def _problems(
    chosen: Tensor, targets: Tensor, vocab_size: int, inputs: PolicyInputs | None
) -> dict[str, Tensor]:
    """Return the error message of each check, with a slot for a count, and its tokens, bool [T]."""
    outside = (targets < 0) | (targets >= vocab_size)
    problems = {f"targets has {{}} values outside 0..{vocab_size - 1}": chosen & outside}
    if inputs is not None:
        left_out = (inputs.loss_weights != 0) & ~chosen
        problems["loss_weights has {} tokens that rows leaves out"] = left_out
        for name in ("advantages", "loss_weights"):
            bad = chosen & ~getattr(inputs, name).isfinite()
            problems[f"{name} has {{}} values that are not finite"] = bad
    return problems


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


class HeadOptions(TypedDict, total=False):
    """Keyword arguments of the head that do not depend on the objective."""

    temperature: float
    """Divisor of the logits; default 1.0."""
    process_group: dist.ProcessGroup | None
    """Tensor-parallel group; default None: a single rank."""
    vocab_size: int | None
    """True vocabulary size: later rows of weight are padding and get no gradient. Default: none."""
    chunk_tokens: int | None
    """Tokens per block; default: as many as fit the buffers, on CUDA as fill the GPU's waves."""
    tile_tokens: int | None
    """Tokens per tile of a block; default: as many as fit the buffers."""
    tp_invariant: bool
    """Whether log-probs, entropy and loss have the same bits for TP 1, 2, 4 and 8; default True.

    It takes eight products with parts of the vocabulary, which fill a GPU less than one does.
    """
    accumulate_in_forward: bool
    """Whether the forward pass adds the weight's gradient to `main_grad`; default False.

    It saves a buffer as large and the passes over it. A backward pass with gradient 1 must follow.
    """
    rows: Tensor | None
    """[R] ascending indices of the tokens to compute, at least those with a loss weight.

    Default: the tokens with a loss weight, or all tokens if there are no loss weights.
    """
    sequence_parallel: bool
    """Whether hidden is cut along the sequence over the process group; default False."""
    check_inputs: bool
    """Whether to check values, which waits for the device once; default True."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Rows are computed in blocks (one d_hidden and d_weight product each) of tiles (one logits
    product and one row pass each)."""

    block_rows: int
    tile_rows: int
    is_even: bool
    """Whether all blocks have about the same size; otherwise all but the last have the full one."""

    def blocks(self, num_rows: int) -> list[RowRange]:
        """Cut rows 0 to num_rows into blocks."""
        return _cut(num_rows, self.block_rows, self.is_even)

    def tiles(self, num_rows: int) -> list[RowRange]:
        """Cut one block's rows into tiles."""
        return _cut(num_rows, self.tile_rows, self.is_even)


def _cut(num_rows: int, size: int, is_even: bool) -> list[RowRange]:
    if is_even and num_rows > 0:
        even, multiple = -(-num_rows // -(-num_rows // size)), _ROW_MULTIPLE["cpu"]
        size = min(size, -(-even // multiple) * multiple)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


@dataclass(frozen=True, kw_only=True)
class HeadCall:
    """One call of the head, fixed before its first product: rows, tiling and shards."""

    targets: Tensor  # [R] int64
    selection: RowSelection
    num_tokens: int
    tiling: Tiling
    shards: VocabShards
    temperature: float
    process_group: dist.ProcessGroup | None
    sequence_parallel: bool
    accumulate_in_forward: bool

    @property
    def num_rows(self) -> int:
        return self.selection.num_rows

    def tile(self, logits: Tensor, rows: slice) -> Tile:
        """Return some of the selected rows with their logits, for the row passes."""
        return Tile(
            logits=logits,
            targets=self.targets[rows],
            shards=self.shards,
            temperature=self.temperature,
        )

    def take(self, values: Tensor) -> Tensor:
        """Return the selected tokens' values of [T], fp32 [R]."""
        return _take(values, self.selection.rows).float().contiguous()

    def spread(self, values: Tensor) -> Tensor:
        """Put per-row values back at their tokens [T], 0 elsewhere."""
        if self.selection.rows is None:
            return values
        return values.new_zeros(self.num_tokens).index_copy_(0, self.selection.rows, values)

    def blocks(self) -> list[RowRange]:
        """Return the rows of each block, in order."""
        return self.tiling.blocks(self.num_rows)

    def exchange(self, hidden: Tensor) -> RowExchange:
        """Return the exchange of hidden rows for one pass over the blocks."""
        rows = self.selection.rows
        if self.sequence_parallel and process_group_size(self.process_group) > 1:
            assert self.process_group is not None
            return ShardedRows(
                hidden, rows, self.selection.counts, self.blocks(), self.process_group
            )
        return ReplicatedRows(hidden, rows, self.process_group)


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def plan_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    inputs: PolicyInputs | None = None,
) -> HeadCall:
    """Check the arguments and fix rows, tiling and shards; the same on every rank.

    Raises:
        TypeError: an option is unknown.
        ValueError: arguments do not fit together or have bad values.
    """
    if unknown := options.keys() - HeadOptions.__annotations__.keys():
        raise TypeError(f"the policy head has no option {', '.join(sorted(unknown))}")
    temperature = options.get("temperature", 1.0)
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    process_group = options.get("process_group")
    sequence_parallel = options.get("sequence_parallel", False)
    tp = process_group_size(process_group)
    num_tokens = check_operands(hidden, weight, targets, tp=tp, sequence_parallel=sequence_parallel)
    for name, value in ({} if inputs is None else vars(inputs)).items():
        if value is not None:
            check_token_tensor(name, value, num_tokens, hidden.device)
    tp_invariant = options.get("tp_invariant", True)
    shards = plan_shards(weight, process_group, options.get("vocab_size"), tp_invariant)
    selection = select_rows(
        targets,
        vocab_size=shards.vocab_size,
        num_parts=tp if sequence_parallel else 1,
        rows=options.get("rows"),
        inputs=inputs,
        check_inputs=options.get("check_inputs", True),
    )
    tiling = plan_tiling(
        shards.size * shards.num_total,
        hidden.shape[1],
        hidden.dtype,
        hidden.device,
        chunk_tokens=options.get("chunk_tokens"),
        tile_tokens=options.get("tile_tokens"),
    )
    return HeadCall(
        targets=_take(targets, selection.rows).long().contiguous(),
        selection=selection,
        num_tokens=num_tokens,
        tiling=tiling,
        shards=shards,
        temperature=float(temperature),
        process_group=process_group if tp > 1 else None,
        sequence_parallel=sequence_parallel,
        accumulate_in_forward=options.get("accumulate_in_forward", False),
    )


def plan_tiling(
    padded_vocab: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chunk_tokens: int | None = None,
    tile_tokens: int | None = None,
) -> Tiling:
    """Choose block and tile heights from the whole vocabulary, so that TP does not change them."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    is_fp32 = dtype == torch.float32
    block_bytes = (FP32_BLOCK_BYTES if is_fp32 else BLOCK_BYTES)[kind]
    block = chunk_tokens
    if block is None:
        block = _fitting_rows(kind, block_bytes, dtype.itemsize * padded_vocab)
        if kind == "cuda":
            block = _rows_that_fill_waves(block, hidden_size)
    tile = tile_tokens
    if tile is None:
        tile = block if is_fp32 else _fitting_rows(kind, TILE_BYTES[kind], 4 * padded_vocab)
    if block < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {block}")
    return Tiling(block_rows=block, tile_rows=min(block, tile), is_even=kind == "cpu")


def _fitting_rows(kind: str, budget: int, row_bytes: int) -> int:
    multiple = _ROW_MULTIPLE[kind]
    return max(multiple, budget // row_bytes // multiple * multiple)


def _rows_that_fill_waves(largest: int, hidden_size: int) -> int:
    """Return the height up to `largest` of blocks that take the least time per row.

    A GPU computes as many tiles of d_hidden at once as it has multiprocessors: a wave. A last wave
    of few tiles takes as long as a full one. The weight's gradient is read and written once more
    for each block, which takes about as long as a wave.
    """
    height, columns = _ROW_MULTIPLE["cuda"], -(-hidden_size // _TILE_COLUMNS)

    def waves_per_tile(tiles: int) -> float:
        return (-(-tiles * columns // _TILES_PER_WAVE) + 1) / tiles

    return height * min(range(largest // height, 0, -1), key=waves_per_tile)


def plan_shards(
    weight: Tensor,
    process_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    tp_invariant: bool,
) -> VocabShards:
    """Cut the vocabulary into shards: one per rank, or equally many for every TP size."""
    tp, rank = process_group_size(process_group), process_group_rank(process_group)
    columns = weight.shape[0]
    padded = columns * tp
    vocab_size = padded if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= padded:
        raise ValueError(
            f"vocab_size {vocab_size} is not in 1..{padded}, the rows of weight over {tp} ranks"
        )
    divides = NUM_VIRTUAL_SHARDS % tp == 0 and columns % (NUM_VIRTUAL_SHARDS // tp) == 0
    divides = divides and padded >= NUM_VIRTUAL_SHARDS * SMALLEST_VIRTUAL_SHARD
    num_local = NUM_VIRTUAL_SHARDS // tp if tp_invariant and divides else 1
    return VocabShards(
        size=columns // num_local,
        num_local=num_local,
        num_total=num_local * tp,
        first=num_local * rank,
        vocab_size=vocab_size,
    )
