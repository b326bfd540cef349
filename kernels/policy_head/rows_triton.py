"""Row passes in Triton: one program per row, or per row and shard for the statistics.

Row offsets are 64-bit. Sums have a fixed order within one program and use no atomics: the same bits
on every run. fp32 throughout; only the stored gradient has the hidden states' dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.launch import block_size, count_bytes, warps_for
from megadapo.kernels.policy_head.terms import DROPPED, describe_terms, token_terms
from megadapo.kernels.policy_head.tiles import (
    MASKED_LOGIT,
    NUM_STATS,
    PolicyInputs,
    RowOutputs,
    Tile,
)

# Triton reads globals only as constexpr
_MASKED_LOGIT = tl.constexpr(MASKED_LOGIT)
_DROPPED = tl.constexpr(DROPPED)


@triton.jit
def row_stats_kernel(
    LOGITS: tl.tensor,  # [R, V/p] fp32
    TARGETS: tl.tensor,  # [R] int64, global ids
    STATS: tl.tensor,  # [S/p, 5, R] fp32
    logits_stride: tl.tensor,
    num_rows: tl.tensor,
    shard_size: tl.tensor,
    vocab_start: tl.tensor,
    vocab_size: tl.tensor,
    inv_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    shard = tl.program_id(1).to(tl.int64)
    first = shard * shard_size
    base = LOGITS + row * logits_stride + first
    # valid columns of this shard; not positive if the whole shard is padding
    num_valid = tl.minimum(vocab_size - vocab_start - first, shard_size)
    offsets = tl.arange(0, BLOCK)

    maximum = tl.full((), _MASKED_LOGIT, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    squares = tl.full((), 0.0, tl.float32)
    target = tl.load(TARGETS + row) - vocab_start - first
    for begin in range(0, num_valid, BLOCK):
        columns = begin + offsets
        inside = columns < num_valid
        z = tl.load(base + columns, mask=inside, other=0.0) * inv_temperature
        z = tl.where(inside, z, _MASKED_LOGIT)
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        gap = maximum - new_maximum
        rescale = tl.exp(gap)
        centred = z - new_maximum
        power = tl.where(inside, tl.exp(centred), 0.0)
        weighted = rescale * (weighted + gap * total) + tl.sum(power * centred, 0)
        total = rescale * total + tl.sum(power, 0)
        other = tl.where(columns == target, 0.0, power)
        squares = rescale * rescale * squares + tl.sum(other * other, 0)
        maximum = new_maximum

    is_here = (target >= 0) & (target < num_valid)
    target_logit = tl.load(base + target, mask=is_here, other=0.0) * inv_temperature
    target_logit = tl.where(is_here, target_logit, _MASKED_LOGIT)
    out = STATS + shard * 5 * num_rows + row
    tl.store(out, maximum)
    tl.store(out + num_rows, total)
    tl.store(out + 2 * num_rows, target_logit)
    tl.store(out + 3 * num_rows, weighted)
    tl.store(out + 4 * num_rows, squares)


@triton.jit
def _merge_row(
    STATS: tl.tensor, row: tl.tensor, num_rows: tl.tensor, num_shards: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Merge the stats of one row, as `rows.merge_stats` does."""
    maximum = tl.full((), _MASKED_LOGIT, tl.float32)
    for shard in range(num_shards):
        maximum = tl.maximum(maximum, tl.load(STATS + shard * 5 * num_rows + row))
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    squares = tl.full((), 0.0, tl.float32)
    target = tl.full((), _MASKED_LOGIT, tl.float32)
    for shard in range(num_shards):
        stats = STATS + shard * 5 * num_rows + row
        gap = tl.load(stats) - maximum
        scale = tl.exp(gap)
        shard_sum = tl.load(stats + num_rows)
        total += scale * shard_sum
        weighted += scale * (tl.load(stats + 3 * num_rows) + gap * shard_sum)
        squares += scale * scale * tl.load(stats + 4 * num_rows)
        target = tl.maximum(target, tl.load(stats + 2 * num_rows))
    log_total = tl.log(total)
    logprob = (target - maximum) - log_total
    rest = 1.0 - tl.exp(logprob)
    distance = tl.sqrt(rest * rest + squares / (total * total))
    return maximum, log_total, logprob, log_total - weighted / total, distance


@triton.jit
def _write_row_grad(
    LOGITS: tl.tensor,
    D_LOGITS: tl.tensor,
    logits_stride: tl.tensor,
    d_logits_stride: tl.tensor,
    row: tl.tensor,
    target: tl.tensor,
    num_columns: tl.tensor,
    num_valid: tl.tensor,
    maximum: tl.tensor,
    log_total: tl.tensor,
    entropy: tl.tensor,
    d_logprob: tl.tensor,
    d_entropy: tl.tensor,
    inv_temperature: tl.tensor,
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one row of d_logits.

    It is (d_logprob (onehot - p) - d_entropy p (log p + entropy)) * inv_temperature.
    """
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
def policy_rows_kernel(
    LOGITS: tl.tensor,  # [R, V/p] fp32
    D_LOGITS: tl.tensor,  # [R, V/p], may be LOGITS
    TARGETS: tl.tensor,  # [R] int64
    STATS: tl.tensor,  # [S, 5, R] fp32
    LOGPROBS_OLD: tl.tensor,
    ADVANTAGES: tl.tensor,
    LOSS_WEIGHTS: tl.tensor,
    LOGPROBS_REF: tl.tensor,
    IMPORTANCE_WEIGHTS: tl.tensor,
    PENALTIES: tl.tensor,
    LOGPROBS: tl.tensor,
    ENTROPY: tl.tensor,
    DISTANCE: tl.tensor,
    LOSS: tl.tensor,
    D_POLICY: tl.tensor,
    RATIO: tl.tensor,
    FLAGS: tl.tensor,
    logits_stride: tl.tensor,
    d_logits_stride: tl.tensor,
    num_rows: tl.tensor,
    num_shards: tl.tensor,
    num_columns: tl.tensor,
    num_valid: tl.tensor,
    vocab_start: tl.tensor,
    inv_temperature: tl.tensor,
    numbers: tl.tuple,  # TermNumbers
    SWITCHES: tl.constexpr,  # TermSwitches
    WRITES_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    maximum, log_total, logprob, entropy, distance = _merge_row(STATS, row, num_rows, num_shards)
    importance_weight = 1.0
    if SWITCHES.has_importance_weights:
        importance_weight = tl.load(IMPORTANCE_WEIGHTS + row)
    penalty = 0.0
    if SWITCHES.has_penalties:
        penalty = tl.load(PENALTIES + row)
    logprob_ref = 0.0
    if SWITCHES.kl_value != "none":
        logprob_ref = tl.load(LOGPROBS_REF + row)
    loss, d_logprob, d_policy, ratio, flags = token_terms(
        logprob=logprob,
        entropy=entropy,
        logprob_old=tl.load(LOGPROBS_OLD + row),
        advantage=tl.load(ADVANTAGES + row),
        importance_weight=importance_weight,
        penalty=penalty,
        logprob_ref=logprob_ref,
        numbers=numbers,
        SWITCHES=SWITCHES,
    )
    tl.store(LOGPROBS + row, logprob)
    tl.store(ENTROPY + row, entropy)
    tl.store(DISTANCE + row, distance)
    tl.store(LOSS + row, loss)
    tl.store(D_POLICY + row, d_policy)
    tl.store(RATIO + row, ratio)
    tl.store(FLAGS + row, flags.to(tl.uint8))
    if WRITES_GRAD:
        weight = tl.load(LOSS_WEIGHTS + row)
        d_entropy = tl.where(flags < _DROPPED, -numbers.entropy_coef * weight, 0.0)
        _write_row_grad(
            LOGITS=LOGITS,
            D_LOGITS=D_LOGITS,
            logits_stride=logits_stride,
            d_logits_stride=d_logits_stride,
            row=row,
            target=tl.load(TARGETS + row) - vocab_start,
            num_columns=num_columns,
            num_valid=num_valid,
            maximum=maximum,
            log_total=log_total,
            entropy=entropy,
            d_logprob=weight * d_logprob,
            d_entropy=d_entropy,
            inv_temperature=inv_temperature,
            HAS_ENTROPY_GRAD=SWITCHES.has_entropy,
            BLOCK=BLOCK,
        )


@triton.jit
def logprob_rows_kernel(
    LOGITS: tl.tensor,  # [R, V/p] fp32
    D_LOGITS: tl.tensor,  # [R, V/p], may be LOGITS
    TARGETS: tl.tensor,  # [R] int64
    STATS: tl.tensor,  # [S, 5, R] fp32
    LOGPROBS: tl.tensor,
    ENTROPY: tl.tensor,
    DISTANCE: tl.tensor,
    D_LOGPROBS: tl.tensor,
    D_ENTROPY: tl.tensor,
    logits_stride: tl.tensor,
    d_logits_stride: tl.tensor,
    num_rows: tl.tensor,
    num_shards: tl.tensor,
    num_columns: tl.tensor,
    num_valid: tl.tensor,
    vocab_start: tl.tensor,
    inv_temperature: tl.tensor,
    WRITES_GRAD: tl.constexpr,  # in place of the outputs
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    maximum, log_total, logprob, entropy, distance = _merge_row(STATS, row, num_rows, num_shards)
    if not WRITES_GRAD:
        tl.store(LOGPROBS + row, logprob)
        tl.store(ENTROPY + row, entropy)
        tl.store(DISTANCE + row, distance)
    if WRITES_GRAD:
        d_entropy = 0.0
        if HAS_ENTROPY_GRAD:
            d_entropy = tl.load(D_ENTROPY + row)
        _write_row_grad(
            LOGITS=LOGITS,
            D_LOGITS=D_LOGITS,
            logits_stride=logits_stride,
            d_logits_stride=d_logits_stride,
            row=row,
            target=tl.load(TARGETS + row) - vocab_start,
            num_columns=num_columns,
            num_valid=num_valid,
            maximum=maximum,
            log_total=log_total,
            entropy=entropy,
            d_logprob=tl.load(D_LOGPROBS + row),
            d_entropy=d_entropy,
            inv_temperature=inv_temperature,
            HAS_ENTROPY_GRAD=HAS_ENTROPY_GRAD,
            BLOCK=BLOCK,
        )


def row_stats_triton(tile: Tile) -> Tensor:
    """Return the tile's stats [S/p, 5, R]; see tiles.NUM_STATS."""
    logits, shards = tile.logits, tile.shards
    stats = torch.empty(
        shards.num_local, NUM_STATS, tile.num_rows, dtype=torch.float32, device=logits.device
    )
    block = block_size(shards.size)
    row_stats_kernel[(tile.num_rows, shards.num_local)](
        LOGITS=logits,
        TARGETS=tile.targets,
        STATS=stats,
        logits_stride=logits.stride(0),
        num_rows=tile.num_rows,
        shard_size=shards.size,
        vocab_start=shards.start,
        vocab_size=shards.vocab_size,
        inv_temperature=tile.inverse_temperature,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    count_bytes(row_stats_kernel.__name__, logits)
    return stats


def policy_rows_triton(
    tile: Tile,
    stats: Tensor,
    inputs: PolicyInputs,
    objective: PolicyObjective,
    outputs: RowOutputs,
    d_logits: Tensor | None,
) -> None:
    """Launch the kernel of `rows.policy_rows`."""
    # an absent input is never loaded, so any pointer will do
    absent = inputs.logprobs_old
    switches, numbers = describe_terms(
        objective,
        has_reference=inputs.logprobs_ref is not None,
        has_importance_weights=inputs.importance_weights is not None,
        has_penalties=inputs.penalties is not None,
    )
    policy_rows_kernel[(tile.num_rows,)](
        **_row_arguments(tile, stats, d_logits),
        LOGPROBS_OLD=inputs.logprobs_old,
        ADVANTAGES=inputs.advantages,
        LOSS_WEIGHTS=inputs.loss_weights,
        LOGPROBS_REF=absent if inputs.logprobs_ref is None else inputs.logprobs_ref,
        IMPORTANCE_WEIGHTS=(
            absent if inputs.importance_weights is None else inputs.importance_weights
        ),
        PENALTIES=absent if inputs.penalties is None else inputs.penalties,
        LOGPROBS=outputs.logprobs,
        ENTROPY=outputs.entropy,
        DISTANCE=outputs.distance,
        LOSS=outputs.loss,
        D_POLICY=outputs.d_policy,
        RATIO=outputs.ratio,
        FLAGS=outputs.flags,
        numbers=numbers,
        SWITCHES=switches,
        WRITES_GRAD=d_logits is not None,
    )
    if d_logits is not None:
        count_bytes(policy_rows_kernel.__name__, tile.logits, d_logits)


def logprob_rows_triton(
    tile: Tile, stats: Tensor, logprobs: Tensor, entropy: Tensor, distance: Tensor
) -> None:
    """Launch the kernel of `rows.logprob_rows`."""
    logprob_rows_kernel[(tile.num_rows,)](
        **_row_arguments(tile, stats, None),
        LOGPROBS=logprobs,
        ENTROPY=entropy,
        DISTANCE=distance,
        D_LOGPROBS=stats,  # not loaded
        D_ENTROPY=stats,  # not loaded
        WRITES_GRAD=False,
        HAS_ENTROPY_GRAD=False,
    )


def logprob_grad_rows_triton(
    tile: Tile, stats: Tensor, d_logprobs: Tensor, d_entropy: Tensor | None, d_logits: Tensor
) -> None:
    """Launch the kernel of `rows.logprob_grad_rows`."""
    logprob_rows_kernel[(tile.num_rows,)](
        **_row_arguments(tile, stats, d_logits),
        LOGPROBS=stats,  # not written
        ENTROPY=stats,  # not written
        DISTANCE=stats,  # not written
        D_LOGPROBS=d_logprobs,
        D_ENTROPY=stats if d_entropy is None else d_entropy,
        WRITES_GRAD=True,
        HAS_ENTROPY_GRAD=d_entropy is not None,
    )
    count_bytes(logprob_rows_kernel.__name__, tile.logits, d_logits)


def _row_arguments(
    tile: Tile, stats: Tensor, d_logits: Tensor | None
) -> dict[str, Tensor | int | float]:
    """Return the launch arguments of both kernels that read merged stats [S, 5, R]."""
    grads = tile.logits if d_logits is None else d_logits
    block = block_size(tile.shards.num_columns)
    return {
        "LOGITS": tile.logits,
        "D_LOGITS": grads,
        "TARGETS": tile.targets,
        "STATS": stats,
        "logits_stride": tile.logits.stride(0),
        "d_logits_stride": grads.stride(0),
        "num_rows": tile.num_rows,
        "num_shards": stats.shape[0],
        "num_columns": tile.shards.num_columns,
        "num_valid": tile.shards.num_valid_columns,
        "vocab_start": tile.shards.start,
        "inv_temperature": tile.inverse_temperature,
        "BLOCK": block,
        "num_warps": warps_for(block),
    }
