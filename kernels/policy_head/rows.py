"""Row passes over a tile of logits, between the policy head's matrix products.

A row is one token's logits over this rank's part of the vocabulary, cut into equal shards in
global order. `row_stats` reads a tile once and returns four numbers per row and shard. Merged over
all shards in a fixed order they give the log-sum-exp, so the result does not depend on how shards
are spread over ranks. `policy_rows` and `logprob_rows` turn them into log-probs and entropy and
overwrite the tile with its gradient. CUDA runs Triton, the CPU compiled C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.launch import uses_triton
from megadapo.kernels.policy_head.rows_cpu import RowGradients, row_grads_cpu, row_stats_cpu
from megadapo.kernels.policy_head.rows_triton import (
    logprob_grad_rows_triton,
    logprob_rows_triton,
    policy_rows_triton,
    row_stats_triton,
)
from megadapo.kernels.policy_head.terms import DROPPED, policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs, RowOutputs, Tile


def merge_stats(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge stats [S, 4, R] over the shards, in order.

    Returns:
        (maximum, log of the sum of e^(z - maximum), log-prob, entropy), each fp32 [R].
    """
    shard_max, shard_sum, shard_target, shard_weighted = stats.unbind(1)  # [S, R] each
    maximum = shard_max.amax(0)
    gap = shard_max - maximum
    scale = gap.exp()
    total = _sum_in_order(scale * shard_sum)
    weighted = _sum_in_order(scale * (shard_weighted + gap * shard_sum))
    log_total = total.log()
    logprobs = (shard_target.amax(0) - maximum) - log_total
    return maximum, log_total, logprobs, log_total - weighted / total


def _sum_in_order(values: Tensor) -> Tensor:
    """Return the sum of [S, R] over S; the order of sum(0) would depend on the number of rows."""
    total = torch.zeros_like(values[0])
    for value in values.unbind(0):
        total = total + value
    return total


def row_stats(tile: Tile) -> Tensor:
    """Return the tile's stats [shards.num_local, 4, R]; see NUM_STATS."""
    return row_stats_triton(tile) if uses_triton(tile.logits) else row_stats_cpu(tile)


def policy_rows(
    tile: Tile,
    stats: Tensor,
    inputs: PolicyInputs,
    objective: PolicyObjective,
    outputs: RowOutputs,
    d_logits: Tensor | None,
) -> None:
    """Fill `outputs` from merged stats [S, 4, R] and write dloss/dlogits into `d_logits`.

    `d_logits` [R, V/p] may be the tile's logits themselves; None: no gradient.
    """
    if uses_triton(tile.logits):
        policy_rows_triton(tile, stats, inputs, objective, outputs, d_logits)
        return
    maximum, log_total, logprobs, entropy = merge_stats(stats)
    terms = policy_terms(logprobs, entropy, inputs, objective)
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
        gradients = RowGradients(
            maximum=maximum,
            log_total=log_total,
            entropy=entropy,
            d_logprobs=inputs.loss_weights * terms.d_logprobs,
            d_entropy=d_entropy,
        )
        row_grads_cpu(tile, gradients, d_logits)


def logprob_rows(tile: Tile, stats: Tensor, *, logprobs: Tensor, entropy: Tensor) -> None:
    """Fill log-probs and entropy, each fp32 [R], from merged stats [S, 4, R]."""
    if uses_triton(tile.logits):
        logprob_rows_triton(tile, stats, logprobs, entropy)
        return
    _, _, row_logprobs, row_entropy = merge_stats(stats)
    logprobs.copy_(row_logprobs)
    entropy.copy_(row_entropy)


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
    maximum, log_total, _, entropy = merge_stats(stats)
    gradients = RowGradients(
        maximum=maximum,
        log_total=log_total,
        entropy=entropy,
        d_logprobs=d_logprobs,
        d_entropy=d_entropy,
    )
    row_grads_cpu(tile, gradients, d_logits)
