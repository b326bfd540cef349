"""Row passes over a tile of logits: what happens between the policy head's matrix products.

A row is one token's logits over this rank's part of the vocabulary, cut into equal shards in
global order. `row_stats` reads a tile once and leaves four numbers per row and shard; merged over
all shards in a fixed order they give the log-sum-exp, so the result does not depend on how the
shards are spread over ranks. `policy_rows` and `logprob_rows` turn them into log-probs and
entropy and overwrite the tile with its gradient. CUDA runs Triton, the CPU in-place torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadapo.dapo.objective import PolicyObjective
from megadapo.kernels.launch import uses_triton
from megadapo.kernels.policy_terms import DROPPED, policy_terms
from megadapo.kernels.row_types import NEVER, NUM_STATS, PolicyInputs, RowOutputs, VocabShards
from megadapo.kernels.vocab_rows_triton import (
    logprob_rows_triton,
    policy_rows_triton,
    row_stats_triton,
)

_CPU_SCRATCH_BYTES = 4 << 20
"""Rows are passed in groups this large: they stay in the last-level cache, and torch's threads
wait for each other once an operation, so there should not be too many operations."""


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

    On the CPU the tile is left as the state that the gradient pass continues from: the softmax
    within each shard, or z - max where the entropy's gradient needs it (`for_entropy`).
    """
    if uses_triton(logits):
        return row_stats_triton(logits, targets, shards, temperature)
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
    if uses_triton(logits):
        policy_rows_triton(
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
            kept = terms.flags.lt(DROPPED)
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
    if uses_triton(logits):
        logprob_rows_triton(
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
    if uses_triton(logits):
        logprob_rows_triton(
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
    centred, shares = (tile, scratch) if for_entropy else (scratch, tile)
    torch.sub(tile, maximum, out=centred)
    # torch's softmax is its fastest exponential; the largest share is e^0 over the sum
    torch.softmax(centred, -1, out=shares)
    total = shares.amax(-1).reciprocal_()
    scratch.mul_(tile)
    stats[:, 0] = maximum[..., 0].t()
    stats[:, 1] = total.t()
    stats[:, 3] = _sum_last(scratch).mul_(total).t()


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

    Continues from what `_row_stats_cpu` left in `logits`: the softmax within each shard, or the
    centred logits c = z - shard max where the entropy has a gradient.
    """
    maximum, log_total, entropy = merged
    mine = stats[shards.first : shards.first + shards.num_local]  # [S/p, 4, R]
    log_scale = mine[:, 0].t() - maximum[:, None] - log_total[:, None]  # log p = c + log_scale
    scale = log_scale.exp() / temperature
    if d_entropy is None:
        direct = -d_logprobs[:, None] * scale * mine[:, 1].t()
    else:
        direct = -scale * (
            d_logprobs[:, None] + d_entropy[:, None] * (log_scale + entropy[:, None])
        )
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
