"""What the policy head decides before it multiplies: its rows, its blocks, its vocabulary shards.

The same inputs give the same plan on every tensor-parallel rank and for every tensor-parallel
size, and in the pass that makes old log-probs as in the update: equal shapes give equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megadapo.kernels.policy_head_exchange import Block, process_group_rank, process_group_size
from megadapo.kernels.policy_head_types import VocabShards

NUM_VIRTUAL_SHARDS = 8
"""Vocabulary shards of the tp_invariant mode: divisible by TP 1, 2, 4 and 8."""
SMALLEST_VIRTUAL_SHARD = 64
"""Columns below which the mode must be asked for: a shard of a few columns is all overhead."""

FP32_BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 24 << 20}
"""Size of the reused buffer with fp32 hidden states: a block's logits, then their gradient."""
BLOCK_BYTES = {"cuda": 3 << 29, "cpu": 32 << 20}
"""Size of the reused buffer for a block's gradient of the logits in a low-precision dtype."""
TILE_BYTES = {"cuda": 3 << 29, "cpu": 16 << 20}
"""Size of the fp32 logits beside it, which are made for a part of the block at a time."""

_ROW_MULTIPLE = 64
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@dataclass(frozen=True, kw_only=True)
class RowSelection:
    """The tokens that enter the head. `rows` None means all of them, in place."""

    rows: Tensor | None
    num_rows: int
    counts: tuple[int, ...]
    """How many of them lie in each tensor-parallel rank's part of the sequence."""

    def take(self, tensor: Tensor) -> Tensor:
        """The selected rows of a per-token tensor."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def spread(self, values: Tensor, num_tokens: int) -> Tensor:
        """Put per-row values back at their tokens, 0 elsewhere."""
        if self.rows is None:
            return values
        return values.new_zeros(num_tokens).index_copy_(0, self.rows, values)


def _cut(num_rows: int, largest: int) -> list[Block]:
    if num_rows == 0:
        return []
    count = -(-num_rows // largest)
    size = -(-num_rows // count)
    size = min(largest, -(-size // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


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
    tp_invariant: bool | None,
) -> VocabShards:
    """Cut the vocabulary; see `policy_head_loss` for tp_invariant."""
    tp, rank = process_group_size(process_group), process_group_rank(process_group)
    columns = weight.shape[0]
    padded = columns * tp
    vocab_size = padded if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= padded:
        raise ValueError(
            f"vocab_size {vocab_size} is not in 1..{padded}, the rows of weight over {tp} ranks"
        )
    divides = NUM_VIRTUAL_SHARDS % tp == 0 and columns % (NUM_VIRTUAL_SHARDS // tp) == 0
    if tp_invariant and not divides:
        raise ValueError(
            f"tp_invariant needs a padded vocabulary divisible by {NUM_VIRTUAL_SHARDS} and a "
            f"tensor-parallel size that divides {NUM_VIRTUAL_SHARDS}; got {padded} rows over {tp} "
            "ranks. Pad the vocabulary to a multiple of 8 x the largest TP, or pass False"
        )
    if tp_invariant is None:
        tp_invariant = divides and padded >= NUM_VIRTUAL_SHARDS * SMALLEST_VIRTUAL_SHARD
    num_local = NUM_VIRTUAL_SHARDS // tp if tp_invariant else 1
    return VocabShards(
        size=columns // num_local,
        num_local=num_local,
        num_total=num_local * tp,
        first=num_local * rank,
        vocab_size=vocab_size,
    )


def check_operands(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, tp: int, sequence_parallel: bool
) -> int:
    """Refuse shapes, dtypes and devices that do not fit; return the number of tokens T."""
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
    """Refuse a per-token tensor of another length or device."""
    if tensor.shape != (num_tokens,):
        raise ValueError(f"{name} must be [T] with T = {num_tokens}, got {_shape(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {device}")


def check_temperature(temperature: float) -> None:
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def select_rows(
    mask: Tensor | None,
    targets: Tensor,
    *,
    vocab_size: int,
    num_parts: int,
    finite: Mapping[str, Tensor],
    rows: Tensor | None,
    check_inputs: bool,
) -> RowSelection:
    """Select the tokens where `mask` [T] is not zero and check what they bring.

    Everything the host must know comes over in one copy. With `rows` from the caller, one part
    and `check_inputs` off the device is not waited for at all.

    Raises ValueError for targets outside the vocabulary and for values in `finite` that are not.
    """
    num_tokens = targets.shape[0]
    if rows is not None and num_parts == 1 and not check_inputs:
        return RowSelection(rows=rows, num_rows=rows.shape[0], counts=(rows.shape[0],))
    chosen = _chosen(mask, rows, targets)
    questions = [chosen.view(num_parts, -1).sum(1)]
    if check_inputs:
        outside = chosen & ((targets < 0) | (targets >= vocab_size))
        questions.append(outside.sum()[None])
        questions.append(_missing(mask, chosen).sum()[None])
        questions += [(chosen & ~value.isfinite()).sum()[None] for value in finite.values()]
    answers = torch.cat(questions).tolist()
    counts, bad = tuple(answers[:num_parts]), answers[num_parts:]
    problems = {
        "targets": f"values outside 0..{vocab_size - 1}",
        "loss_weights": "tokens that rows leaves out",
    }
    problems |= {f"{name} ": "values that are not finite" for name in finite}
    for (name, problem), count in zip(problems.items(), bad, strict=check_inputs):
        if count:
            raise ValueError(f"{name.strip()} has {count} {problem}")
    num_rows = sum(counts)
    if num_rows == num_tokens:
        return RowSelection(rows=None, num_rows=num_rows, counts=counts)
    if rows is None:
        rows = torch.nonzero_static(chosen, size=num_rows)[:, 0]
    return RowSelection(rows=rows, num_rows=num_rows, counts=counts)


def _chosen(mask: Tensor | None, rows: Tensor | None, targets: Tensor) -> Tensor:
    """Which tokens enter the head, bool [T]."""
    if rows is not None:
        chosen = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
        return chosen.index_fill_(0, rows, True)
    if mask is None:
        return torch.ones(targets.shape, dtype=torch.bool, device=targets.device)
    return mask != 0


def _missing(mask: Tensor | None, chosen: Tensor) -> Tensor:
    """Tokens that have a loss weight and are not computed, bool [T]."""
    return torch.zeros_like(chosen) if mask is None else (mask != 0) & ~chosen


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
