"""The row passes in Triton, one program a row, or a row and shard for the statistics.

Row offsets are 64-bit, sums are taken in a fixed order within one program: no atomics, the same
bits on every run. fp32 throughout; only the stored gradient has the hidden states' dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.launch import CompileCase, block_size, warps_for
from megadapo.kernels.policy_head_terms import DROPPED, KL_KINDS, kl_kind, token_terms
from megadapo.kernels.policy_head_types import (
    NEVER,
    NUM_STATS,
    PolicyInputs,
    RowOutputs,
    VocabShards,
)
from megadapo.kernels.traffic import moved

# Triton reads globals only as constexpr
_NEVER = tl.constexpr(NEVER)
_DROPPED = tl.constexpr(DROPPED)


@triton.jit
def _row_stats_kernel(
    LOGITS,  # [R, V/p] fp32
    TARGETS,  # [R] int64, global ids
    STATS,  # [S/p, 4, R] fp32
    logits_stride,
    num_rows,
    shard_size,
    vocab_start,
    vocab_size,
    inv_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    shard = tl.program_id(1).to(tl.int64)
    first = shard * shard_size
    base = LOGITS + row * logits_stride + first
    # valid columns of this shard; none where the whole shard is padding
    num_valid = tl.minimum(vocab_size - vocab_start - first, shard_size)
    offsets = tl.arange(0, BLOCK)

    maximum = tl.full((), _NEVER, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for begin in range(0, num_valid, BLOCK):
        columns = begin + offsets
        inside = columns < num_valid
        z = tl.load(base + columns, mask=inside, other=0.0) * inv_temperature
        z = tl.where(inside, z, _NEVER)
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        gap = maximum - new_maximum
        rescale = tl.exp(gap)
        centred = z - new_maximum
        power = tl.where(inside, tl.exp(centred), 0.0)
        weighted = rescale * (weighted + gap * total) + tl.sum(power * centred, 0)
        total = rescale * total + tl.sum(power, 0)
        maximum = new_maximum

    target = tl.load(TARGETS + row) - vocab_start - first
    is_here = (target >= 0) & (target < num_valid)
    target_logit = tl.load(base + target, mask=is_here, other=0.0) * inv_temperature
    target_logit = tl.where(is_here, target_logit, _NEVER)
    out = STATS + shard * 4 * num_rows + row
    tl.store(out, maximum)
    tl.store(out + num_rows, total)
    tl.store(out + 2 * num_rows, target_logit)
    tl.store(out + 3 * num_rows, weighted)


@triton.jit
def _merge_row(STATS, row, num_rows, num_shards):
    """`merge_stats` for one row."""
    maximum = tl.full((), _NEVER, tl.float32)
    for shard in range(num_shards):
        maximum = tl.maximum(maximum, tl.load(STATS + shard * 4 * num_rows + row))
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    target = tl.full((), _NEVER, tl.float32)
    for shard in range(num_shards):
        stats = STATS + shard * 4 * num_rows + row
        gap = tl.load(stats) - maximum
        scale = tl.exp(gap)
        shard_sum = tl.load(stats + num_rows)
        total += scale * shard_sum
        weighted += scale * (tl.load(stats + 3 * num_rows) + gap * shard_sum)
        target = tl.maximum(target, tl.load(stats + 2 * num_rows))
    log_total = tl.log(total)
    return maximum, log_total, (target - maximum) - log_total, log_total - weighted / total


@triton.jit
def _write_row_grad(
    LOGITS,
    D_LOGITS,
    logits_stride,
    d_logits_stride,
    row,
    target,
    num_columns,
    num_valid,
    maximum,
    log_total,
    entropy,
    d_logprob,
    d_entropy,
    inv_temperature,
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d_logits = (d_logprob (onehot - p) - d_entropy p (log p + H)) * inv_temperature, one row."""
    offsets = tl.arange(0, BLOCK)
    source = LOGITS + row * logits_stride
    destination = D_LOGITS + row * d_logits_stride
    for begin in range(0, num_columns, BLOCK):
        columns = begin + offsets
        inside = columns < num_valid
        z = tl.load(source + columns, mask=inside, other=0.0) * inv_temperature
        log_p = (z - maximum) - log_total
        p = tl.exp(log_p)
        onehot = tl.where(columns == target, 1.0, 0.0)
        grad = d_logprob * (onehot - p)
        if HAS_ENTROPY_GRAD:
            grad -= d_entropy * p * (log_p + entropy)
        # padding gets an exact zero, so that its weight rows have no gradient
        grad = tl.where(inside, grad * inv_temperature, 0.0)
        grad = grad.to(D_LOGITS.dtype.element_ty)
        tl.store(destination + columns, grad, mask=columns < num_columns)


@triton.jit
def _policy_rows_kernel(
    LOGITS,  # [R, V/p] fp32
    D_LOGITS,  # [R, V/p], may be LOGITS
    TARGETS,  # [R] int64
    STATS,  # [S, 4, R] fp32
    OLD_LOGPROBS,
    ADVANTAGES,
    LOSS_WEIGHTS,
    REF_LOGPROBS,
    IMPORTANCE_WEIGHTS,
    LOGPROBS,
    ENTROPY,
    LOSS,
    RATIO,
    KL,
    FLAGS,
    logits_stride,
    d_logits_stride,
    num_rows,
    num_shards,
    num_columns,
    num_valid,
    vocab_start,
    inv_temperature,
    ratio_low,
    ratio_high,
    dual_clip,
    entropy_coef,
    kl_coef,
    HAS_DUAL_CLIP: tl.constexpr,
    KL_KIND: tl.constexpr,
    HAS_IMPORTANCE_WEIGHTS: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    maximum, log_total, logprob, entropy = _merge_row(STATS, row, num_rows, num_shards)
    importance_weight = 1.0
    if HAS_IMPORTANCE_WEIGHTS:
        importance_weight = tl.load(IMPORTANCE_WEIGHTS + row)
    logprob_ref = 0.0
    if KL_KIND != 0:
        logprob_ref = tl.load(REF_LOGPROBS + row)
    loss, d_logprob, ratio, kl, flags = token_terms(
        logprob,
        entropy,
        tl.load(OLD_LOGPROBS + row),
        tl.load(ADVANTAGES + row),
        importance_weight,
        logprob_ref,
        ratio_low,
        ratio_high,
        dual_clip,
        entropy_coef,
        kl_coef,
        HAS_DUAL_CLIP,
        KL_KIND,
    )
    tl.store(LOGPROBS + row, logprob)
    tl.store(ENTROPY + row, entropy)
    tl.store(LOSS + row, loss)
    tl.store(RATIO + row, ratio)
    tl.store(KL + row, kl)
    tl.store(FLAGS + row, flags.to(tl.uint8))
    if WRITES_GRAD:
        weight = tl.load(LOSS_WEIGHTS + row)
        d_entropy = tl.where(flags < _DROPPED, -entropy_coef * weight, 0.0)
        _write_row_grad(
            LOGITS,
            D_LOGITS,
            logits_stride,
            d_logits_stride,
            row,
            tl.load(TARGETS + row) - vocab_start,
            num_columns,
            num_valid,
            maximum,
            log_total,
            entropy,
            weight * d_logprob,
            d_entropy,
            inv_temperature,
            HAS_ENTROPY_GRAD,
            BLOCK,
        )


@triton.jit
def _logprob_rows_kernel(
    LOGITS,  # [R, V/p] fp32
    D_LOGITS,  # [R, V/p], may be LOGITS
    TARGETS,  # [R] int64
    STATS,  # [S, 4, R] fp32
    LOGPROBS,
    ENTROPY,
    D_LOGPROBS,
    D_ENTROPY,
    logits_stride,
    d_logits_stride,
    num_rows,
    num_shards,
    num_columns,
    num_valid,
    vocab_start,
    inv_temperature,
    WRITES_OUTPUTS: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    maximum, log_total, logprob, entropy = _merge_row(STATS, row, num_rows, num_shards)
    if WRITES_OUTPUTS:
        tl.store(LOGPROBS + row, logprob)
        tl.store(ENTROPY + row, entropy)
    if WRITES_GRAD:
        d_entropy = 0.0
        if HAS_ENTROPY_GRAD:
            d_entropy = tl.load(D_ENTROPY + row)
        _write_row_grad(
            LOGITS,
            D_LOGITS,
            logits_stride,
            d_logits_stride,
            row,
            tl.load(TARGETS + row) - vocab_start,
            num_columns,
            num_valid,
            maximum,
            log_total,
            entropy,
            tl.load(D_LOGPROBS + row),
            d_entropy,
            inv_temperature,
            HAS_ENTROPY_GRAD,
            BLOCK,
        )


def row_stats_triton(
    logits: Tensor, targets: Tensor, shards: VocabShards, temperature: float
) -> Tensor:
    num_rows = logits.shape[0]
    stats = torch.empty(
        shards.num_local, NUM_STATS, num_rows, dtype=torch.float32, device=logits.device
    )
    block = block_size(shards.size)
    _row_stats_kernel[(num_rows, shards.num_local)](
        logits,
        targets,
        stats,
        logits.stride(0),
        num_rows,
        shards.size,
        shards.start,
        shards.vocab_size,
        1.0 / temperature,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    moved(_row_stats_kernel.__name__, logits)
    return stats


def policy_rows_triton(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    inputs: PolicyInputs,
    outputs: RowOutputs,
    objective: PolicyObjective,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor | None,
) -> None:
    block = block_size(shards.num_columns)
    grads = logits if d_logits is None else d_logits
    # an absent input is never loaded; any pointer fills its place
    absent = inputs.logprobs_old
    _policy_rows_kernel[(logits.shape[0],)](
        logits,
        grads,
        targets,
        stats,
        inputs.logprobs_old,
        inputs.advantages,
        inputs.loss_weights,
        absent if inputs.logprobs_ref is None else inputs.logprobs_ref,
        absent if inputs.importance_weights is None else inputs.importance_weights,
        outputs.logprobs,
        outputs.entropy,
        outputs.loss,
        outputs.ratio,
        outputs.kl,
        outputs.flags,
        logits.stride(0),
        grads.stride(0),
        logits.shape[0],
        stats.shape[0],
        shards.num_columns,
        shards.num_valid_columns,
        shards.start,
        1.0 / temperature,
        1.0 - objective.clip_low,
        1.0 + objective.clip_high,
        float(objective.dual_clip or 0.0),
        float(objective.entropy_coef),
        float(objective.kl_coef),
        HAS_DUAL_CLIP=objective.dual_clip is not None,
        KL_KIND=KL_KINDS[kl_kind(objective, inputs.logprobs_ref)],
        HAS_IMPORTANCE_WEIGHTS=inputs.importance_weights is not None,
        HAS_ENTROPY_GRAD=objective.entropy_coef != 0.0,
        WRITES_GRAD=d_logits is not None,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    if d_logits is not None:
        moved(_policy_rows_kernel.__name__, logits, d_logits)


def logprob_rows_triton(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    outputs: tuple[Tensor, Tensor] | None,
    d_outputs: tuple[Tensor, Tensor | None] | None,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor | None,
) -> None:
    block = block_size(shards.num_columns)
    grads = logits if d_logits is None else d_logits
    logprobs, entropy = outputs if outputs is not None else (stats, stats)
    d_logprobs, d_entropy = d_outputs if d_outputs is not None else (stats, None)
    _logprob_rows_kernel[(logits.shape[0],)](
        logits,
        grads,
        targets,
        stats,
        logprobs,
        entropy,
        d_logprobs,
        stats if d_entropy is None else d_entropy,
        logits.stride(0),
        grads.stride(0),
        logits.shape[0],
        stats.shape[0],
        shards.num_columns,
        shards.num_valid_columns,
        shards.start,
        1.0 / temperature,
        WRITES_OUTPUTS=outputs is not None,
        WRITES_GRAD=d_outputs is not None,
        HAS_ENTROPY_GRAD=d_entropy is not None,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    if d_outputs is not None:
        moved(_logprob_rows_kernel.__name__, logits, d_logits)


_ROW_STRIDE = 152064
_TILE_ROWS = 2560

COMPILE_CASES = (
    CompileCase(
        kernel=_row_stats_kernel,
        label="[2560, 152064] in 8 shards",
        values={
            "LOGITS": "*fp32",
            "TARGETS": "*i64",
            "STATS": "*fp32",
            "logits_stride": _ROW_STRIDE,
            "num_rows": _TILE_ROWS,
            "shard_size": _ROW_STRIDE // 8,
            "vocab_start": 0,
            "vocab_size": _ROW_STRIDE,
            "inv_temperature": "fp32",
        },
        constants={"BLOCK": 4096},
        num_warps=warps_for(4096),
    ),
    *(
        CompileCase(
            kernel=_policy_rows_kernel,
            label=f"{dtype} gradient [2560, 152064], {words}",
            values={
                "LOGITS": "*fp32",
                "D_LOGITS": f"*{dtype}",
                "TARGETS": "*i64",
                "STATS": "*fp32",
                "OLD_LOGPROBS": "*fp32",
                "ADVANTAGES": "*fp32",
                "LOSS_WEIGHTS": "*fp32",
                "REF_LOGPROBS": "*fp32",
                "IMPORTANCE_WEIGHTS": "*fp32",
                "LOGPROBS": "*fp32",
                "ENTROPY": "*fp32",
                "LOSS": "*fp32",
                "RATIO": "*fp32",
                "KL": "*fp32",
                "FLAGS": "*u8",
                "logits_stride": _ROW_STRIDE,
                "d_logits_stride": _ROW_STRIDE,
                "num_rows": _TILE_ROWS,
                "num_shards": 8,
                "num_columns": _ROW_STRIDE,
                "num_valid": _ROW_STRIDE,
                "vocab_start": 0,
                "inv_temperature": "fp32",
                "ratio_low": "fp32",
                "ratio_high": "fp32",
                "dual_clip": "fp32",
                "entropy_coef": "fp32",
                "kl_coef": "fp32",
            },
            constants={
                "HAS_DUAL_CLIP": options,
                "KL_KIND": KL_KINDS["k3"] if options else 0,
                "HAS_IMPORTANCE_WEIGHTS": options,
                "HAS_ENTROPY_GRAD": options,
                "WRITES_GRAD": True,
                "BLOCK": 4096,
            },
            num_warps=warps_for(4096),
        )
        for dtype in ("bf16", "fp32")
        for options, words in ((False, "DAPO"), (True, "every option"))
    ),
    CompileCase(
        kernel=_logprob_rows_kernel,
        label="bf16 gradient [2560, 152064]",
        values={
            "LOGITS": "*fp32",
            "D_LOGITS": "*bf16",
            "TARGETS": "*i64",
            "STATS": "*fp32",
            "LOGPROBS": "*fp32",
            "ENTROPY": "*fp32",
            "D_LOGPROBS": "*fp32",
            "D_ENTROPY": "*fp32",
            "logits_stride": _ROW_STRIDE,
            "d_logits_stride": _ROW_STRIDE,
            "num_rows": _TILE_ROWS,
            "num_shards": 8,
            "num_columns": _ROW_STRIDE,
            "num_valid": _ROW_STRIDE,
            "vocab_start": 0,
            "inv_temperature": "fp32",
        },
        constants={
            "WRITES_OUTPUTS": False,
            "WRITES_GRAD": True,
            "HAS_ENTROPY_GRAD": True,
            "BLOCK": 4096,
        },
        num_warps=warps_for(4096),
    ),
)
