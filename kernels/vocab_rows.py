"""Row passes over a tile of logits: what happens between the policy head's matrix products.

A row is one token's logits over this rank's part of the vocabulary, cut into equal shards in
global order. `row_stats` reads a tile once and leaves four numbers per row and shard; merged over
all shards in a fixed order they give the log-sum-exp, so the result does not depend on how the
shards are spread over ranks. `policy_rows` and `logprob_rows` turn them into log-probs and
entropy and overwrite the tile with its gradient. CUDA runs Triton, the CPU in-place torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.dapo.objective import PolicyObjective
from megadapo.kernels.policy_terms import KL_KINDS, kl_kind, policy_terms, token_terms

NUM_STATS = 4
"""Per row and shard: maximum, sum of e^(z - max), target's logit, sum of e^(z - max) (z - max)."""

NEVER = -1e30
"""The logit of a padded vocabulary row: below every real one, and still finite when squared
differences are not taken, so that 0 * NEVER stays 0 and no NaN appears."""

_NEVER = tl.constexpr(NEVER)
_CPU_SCRATCH_BYTES = 512 * 1024
"""Rows are passed in groups this large, which stay in a core's second-level cache."""


@dataclass(frozen=True, kw_only=True)
class VocabShards:
    """How the vocabulary is cut: local column c lies in global shard first + c // size."""

    size: int
    num_local: int
    num_total: int
    first: int
    vocab_size: int
    """True vocabulary size; global columns from here on are padding."""

    @property
    def start(self) -> int:
        """Global vocabulary id of local column 0."""
        return self.first * self.size

    @property
    def num_columns(self) -> int:
        return self.num_local * self.size

    @property
    def num_valid_columns(self) -> int:
        """Local columns that are not padding."""
        return min(max(self.vocab_size - self.start, 0), self.num_columns)


@dataclass(frozen=True, kw_only=True)
class RowOutputs:
    """Per-token results, each [R]; filled tile by tile."""

    logprobs: Tensor
    entropy: Tensor
    loss: Tensor
    ratio: Tensor
    kl: Tensor
    flags: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> RowOutputs:
        values = torch.zeros(5, num_rows, dtype=torch.float32, device=device)
        flags = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        names = ("logprobs", "entropy", "loss", "ratio", "kl")
        return cls(**dict(zip(names, values, strict=True)), flags=flags)

    def rows(self, start: int, stop: int) -> RowOutputs:
        """A view of rows start to stop."""
        return RowOutputs(**{name: value[start:stop] for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What the objective needs of each token, each fp32 [R]."""

    old_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None

    def rows(self, start: int, stop: int) -> PolicyInputs:
        """A view of rows start to stop."""
        return PolicyInputs(
            **{
                name: None if value is None else value[start:stop]
                for name, value in vars(self).items()
            }
        )


def merge_stats(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge stats [S, 4, R] over the shards, in order.

    Returns (maximum, log of the sum of e^(z - maximum), log-prob, entropy), each fp32 [R].
    """
    maximum = stats[:, 0].amax(0)
    total = torch.zeros_like(maximum)
    weighted = torch.zeros_like(maximum)
    target = torch.full_like(maximum, NEVER)
    for shard_max, shard_sum, shard_target, shard_weighted in stats.unbind(0):
        gap = shard_max - maximum
        scale = gap.exp()
        total = total + scale * shard_sum
        weighted = weighted + scale * (shard_weighted + gap * shard_sum)
        target = torch.maximum(target, shard_target)
    log_total = total.log()
    return maximum, log_total, (target - maximum) - log_total, log_total - weighted / total


def row_stats(
    logits: Tensor, targets: Tensor, *, shards: VocabShards, temperature: float, for_entropy: bool
) -> Tensor:
    """Return stats [shards.num_local, 4, R] of logits [R, V/p] fp32 for targets [R] int64.

    On the CPU the tile is left as the state that the gradient pass continues from: e^(z - max)
    of each shard, or z - max where the entropy's gradient needs it (`for_entropy`).
    """
    if _use_triton(logits):
        return _row_stats_triton(logits, targets, shards, temperature)
    return _row_stats_cpu(logits, targets, shards, temperature, for_entropy)


def policy_rows(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    *,
    inputs: PolicyInputs,
    outputs: RowOutputs,
    objective: PolicyObjective,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor | None,
) -> None:
    """Fill `outputs` from merged stats [S, 4, R] and write dloss/dlogits into `d_logits`.

    `d_logits` [R, V/p] may be `logits` itself; None leaves the gradient out.
    """
    if _use_triton(logits):
        _policy_rows_triton(
            logits, targets, stats, inputs, outputs, objective, shards, temperature, d_logits
        )
        return
    maximum, log_total, logprobs, entropy = merge_stats(stats)
    terms = policy_terms(
        logprobs,
        entropy,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        objective=objective,
        ref_logprobs=inputs.ref_logprobs,
        importance_weights=inputs.importance_weights,
    )
    outputs.logprobs.copy_(logprobs)
    outputs.entropy.copy_(entropy)
    outputs.loss.copy_(terms.loss)
    outputs.ratio.copy_(terms.ratio)
    outputs.kl.copy_(terms.kl)
    outputs.flags.copy_(terms.flags)
    if d_logits is not None:
        d_entropy = None
        if objective.entropy_coef != 0.0:
            kept = terms.flags.lt(8)
            d_entropy = -objective.entropy_coef * inputs.loss_weights * kept
        _row_grad_cpu(
            logits,
            targets,
            stats,
            (maximum, log_total, entropy),
            d_logprobs=inputs.loss_weights * terms.d_logprobs,
            d_entropy=d_entropy,
            shards=shards,
            temperature=temperature,
            d_logits=d_logits,
        )


def logprob_rows(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    *,
    logprobs: Tensor,
    entropy: Tensor,
    shards: VocabShards,
    temperature: float,
) -> None:
    """Fill log-probs and entropy, each fp32 [R], from merged stats [S, 4, R]."""
    if _use_triton(logits):
        _logprob_rows_triton(
            logits, targets, stats, (logprobs, entropy), None, shards, temperature, None
        )
        return
    _, _, row_logprobs, row_entropy = merge_stats(stats)
    logprobs.copy_(row_logprobs)
    entropy.copy_(row_entropy)


def logprob_grad_rows(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    *,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor,
) -> None:
    """Write d_logits [R, V/p] for gradients of log-probs and entropy, each fp32 [R].

    `logits` are fresh from the product and `stats` the merged ones of the forward pass.
    """
    if _use_triton(logits):
        _logprob_rows_triton(
            logits, targets, stats, None, (d_logprobs, d_entropy), shards, temperature, d_logits
        )
        return
    _row_stats_cpu(logits, targets, shards, temperature, d_entropy is not None)
    maximum, log_total, _, entropy = merge_stats(stats)
    _row_grad_cpu(
        logits,
        targets,
        stats,
        (maximum, log_total, entropy),
        d_logprobs=d_logprobs,
        d_entropy=d_entropy,
        shards=shards,
        temperature=temperature,
        d_logits=d_logits,
    )


def _use_triton(logits: Tensor) -> bool:
    """CUDA always; elsewhere only under Triton's interpreter, which is how its tests run."""
    return logits.device.type == "cuda" or triton.knobs.runtime.interpret


def _local_targets(targets: Tensor, shards: VocabShards) -> tuple[Tensor, Tensor]:
    """Return (local column clamped into range, whether this rank holds the target), each [R]."""
    local = targets - shards.start
    is_here = (local >= 0) & (local < shards.num_columns)
    return local.clamp(0, shards.num_columns - 1), is_here


def _row_groups(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Groups of rows that fit the cache, at least two rows each where there are two.

    torch splits a sum with a single result over its threads, which would change its bits.
    """
    size = max(2, _CPU_SCRATCH_BYTES // (4 * num_columns))
    starts = list(range(0, num_rows, size))
    if len(starts) > 1 and num_rows - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], num_rows], strict=True))


def _row_stats_cpu(
    logits: Tensor, targets: Tensor, shards: VocabShards, temperature: float, for_entropy: bool
) -> Tensor:
    num_rows = logits.shape[0]
    columns, is_here = _local_targets(targets, shards)
    target_logits = logits.gather(1, columns[:, None])[:, 0] * (1.0 / temperature)
    holder = torch.where(is_here, columns // shards.size, -1)
    stats = torch.empty(shards.num_local, NUM_STATS, num_rows, dtype=torch.float32)
    for shard in range(shards.num_local):
        stats[shard, 2] = torch.where(holder == shard, target_logits, NEVER)

    groups = _row_groups(num_rows, logits.shape[1])
    tallest = max(stop - start for start, stop in groups)
    scratch = torch.empty(tallest, shards.num_local, shards.size, dtype=torch.float32)
    for start, stop in groups:
        _group_stats_cpu(
            logits[start:stop],
            scratch[: stop - start],
            stats[:, :, start:stop],
            shards=shards,
            temperature=temperature,
            for_entropy=for_entropy,
        )
    return stats


def _group_stats_cpu(
    logits: Tensor,
    scratch: Tensor,
    stats: Tensor,
    *,
    shards: VocabShards,
    temperature: float,
    for_entropy: bool,
) -> None:
    """One cached group of rows: stats [S, 4, r] from logits [r, V/p]; see `row_stats`."""
    if temperature != 1.0:
        logits.mul_(1.0 / temperature)
    logits[:, shards.num_valid_columns :] = NEVER
    tile = logits.view(-1, shards.num_local, shards.size)
    maximum = tile.amax(-1, keepdim=True)
    centred, powers = (tile, scratch) if for_entropy else (scratch, tile)
    torch.sub(tile, maximum, out=centred)
    torch.exp(centred, out=powers)
    total = _sum_last(powers)
    scratch.mul_(tile)
    stats[:, 0] = maximum[..., 0].t()
    stats[:, 1] = total.t()
    stats[:, 3] = _sum_last(scratch).t()


def _sum_last(x: Tensor) -> Tensor:
    """Sum [r, S, n] over the last dimension to [r, S], with the same bits for every r and S."""
    if x.shape[0] * x.shape[1] == 1:
        # a lone result would be split over threads; two results are not
        return x.expand(2, -1, -1).sum(-1)[:1]
    return x.sum(-1)


def _row_grad_cpu(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    merged: tuple[Tensor, Tensor, Tensor],
    *,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor,
) -> None:
    """Write d_logits [R, V/p] = (d_logprob (onehot - p) - d_entropy p (log p + H)) / temperature.

    Continues from what `_row_stats_cpu` left in `logits`: powers e = e^(z - shard max), or the
    centred logits c = z - shard max where the entropy has a gradient.
    """
    maximum, log_total, entropy = merged
    mine = stats[shards.first : shards.first + shards.num_local, 0].t()  # [R, S/p]
    log_scale = mine - maximum[:, None] - log_total[:, None]  # log p = c + log_scale
    scale = log_scale.exp() / temperature
    direct = -d_logprobs[:, None] * scale
    if d_entropy is not None:
        direct = direct - d_entropy[:, None] * scale * (log_scale + entropy[:, None])
    columns, is_here = _local_targets(targets, shards)
    onehot = torch.where(is_here, d_logprobs / temperature, 0.0)

    groups = _row_groups(logits.shape[0], logits.shape[1])
    tallest = max(stop - start for start, stop in groups)
    scratch = torch.empty(tallest, shards.num_local, shards.size, dtype=torch.float32)
    for start, stop in groups:
        tile = logits[start:stop].view(-1, shards.num_local, shards.size)
        factor = direct[start:stop, :, None]
        if d_entropy is None:
            tile.mul_(factor)
        else:
            powers = torch.exp(tile, out=scratch[: stop - start])
            through_entropy = -d_entropy[start:stop, None] * scale[start:stop]
            tile.mul_(powers).mul_(through_entropy[:, :, None]).addcmul_(powers, factor)
        logits[start:stop].scatter_add_(1, columns[start:stop, None], onehot[start:stop, None])
        if d_logits.data_ptr() != logits.data_ptr():
            d_logits[start:stop].copy_(logits[start:stop])


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
    num_valid = tl.minimum(vocab_size - vocab_start - first, shard_size.to(tl.int64))
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
    ref_logprob = 0.0
    if KL_KIND != 0:
        ref_logprob = tl.load(REF_LOGPROBS + row)
    loss, d_logprob, ratio, kl, flags = token_terms(
        logprob,
        entropy,
        tl.load(OLD_LOGPROBS + row),
        tl.load(ADVANTAGES + row),
        importance_weight,
        ref_logprob,
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
        d_entropy = tl.where(flags < 8, -entropy_coef * weight, 0.0)
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


def _block_size(num_columns: int) -> int:
    """Columns per step. A function of the shard alone, so that sums do not depend on TP."""
    return max(128, min(4096, triton.next_power_of_2(num_columns)))


def _num_warps(block: int) -> int:
    return 8 if block >= 2048 else 4


def _row_stats_triton(
    logits: Tensor, targets: Tensor, shards: VocabShards, temperature: float
) -> Tensor:
    num_rows = logits.shape[0]
    stats = torch.empty(
        shards.num_local, NUM_STATS, num_rows, dtype=torch.float32, device=logits.device
    )
    block = _block_size(shards.size)
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
        num_warps=_num_warps(block),
    )
    return stats


def _policy_rows_triton(
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
    block = _block_size(shards.num_columns)
    grads = logits if d_logits is None else d_logits
    # an absent input is never loaded; any pointer fills its place
    absent = inputs.old_logprobs
    _policy_rows_kernel[(logits.shape[0],)](
        logits,
        grads,
        targets,
        stats,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.loss_weights,
        absent if inputs.ref_logprobs is None else inputs.ref_logprobs,
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
        KL_KIND=KL_KINDS[kl_kind(objective, inputs.ref_logprobs)],
        HAS_IMPORTANCE_WEIGHTS=inputs.importance_weights is not None,
        HAS_ENTROPY_GRAD=objective.entropy_coef != 0.0,
        WRITES_GRAD=d_logits is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )


def _logprob_rows_triton(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    outputs: tuple[Tensor, Tensor] | None,
    d_outputs: tuple[Tensor, Tensor | None] | None,
    shards: VocabShards,
    temperature: float,
    d_logits: Tensor | None,
) -> None:
    block = _block_size(shards.num_columns)
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
        num_warps=_num_warps(block),
    )
