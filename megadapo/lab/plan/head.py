"""What the policy head takes while it computes the loss of a micro-batch and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megadapo.lab.plan.activations import LayerWidths

if TYPE_CHECKING:
    from megadapo.kernels.policy_head.tiling import Tiling

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class HeadBytes:
    """Bytes on one tensor-parallel rank of the last stage."""

    chunk: int
    """The reused buffers: a block's gradient of the logits, and a tile's logits."""
    gradients: int
    """Of the rank's rows of the output weight, and of the hidden states."""
    rows: int
    """Hidden states before and after the last norm, and those of the blocks on their way."""

    @property
    def total(self) -> int:
        return self.chunk + self.gradients + self.rows


def head_bytes(widths: LayerWidths, *, padded_vocab: int, tp: int, num_tokens: int) -> HeadBytes:
    """At the head's own cut into blocks, with every token predicted."""
    tiling = head_tiling(widths, padded_vocab)
    columns, size = padded_vocab // tp, widths.itemsize
    block = min(tiling.block_rows, num_tokens)
    num_blocks = -(-num_tokens // tiling.block_rows)
    logits = 0 if size == FP32_BYTES else min(tiling.tile_rows, block) * columns * FP32_BYTES
    wide = block * widths.hidden * FP32_BYTES if widths.fused and size < FP32_BYTES else 0
    residual = num_tokens * widths.residual * size
    # with sequence parallelism the block after this one travels meanwhile
    num_fetched = min(num_blocks, 2) if widths.gathered else 1
    in_fp32 = widths.fused or num_blocks > 1
    return HeadBytes(
        chunk=block * columns * size + logits + int(wide),
        # a row's gradient lies among those of the predicted rows, then among all
        gradients=int(columns * widths.hidden * (FP32_BYTES if in_fp32 else size) + 2 * residual),
        rows=int(2 * residual + num_fetched * block * widths.hidden * size),
    )


def head_tiling(widths: LayerWidths, padded_vocab: int) -> Tiling:
    """How the head cuts rows of this type into blocks and tiles."""
    import torch

    from megadapo.kernels.policy_head.tiling import plan_tiling

    dtype = torch.float32 if widths.itemsize == FP32_BYTES else torch.bfloat16
    device = torch.device("cuda" if widths.fused else "cpu")
    return plan_tiling(padded_vocab, dtype, device, None)
