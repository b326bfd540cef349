"""What an update is held against: old log-probs, and weights of tokens that others sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.algorithm.importance import (
    ImportanceConfig,
    bounded_weights,
    importance_ratios,
    is_outside,
)
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.model.parallel import add_up_over_context


@dataclass(frozen=True, kw_only=True)
class OldPolicy:
    """Of one micro-batch; [T] tensors are fp32 and mean something at its rows only."""

    proximal: Tensor
    """[T] the trainer's log-probs before the step's first update."""
    logprobs: Tensor
    """[T] what the ratio is taken against; `proximal` itself unless stale tokens keep the
    engine's."""
    importance_weights: Tensor | None = None
    """[T], 1 on tokens that are not weighted; None where no token is."""
    logprobs_ref: Tensor | None = None
    """[T] of the reference policy, for the loss; None where that has no KL divergence."""
    kl: Tensor | None = None
    """[R] float64, estimate of each predicted token's KL divergence before the step's first update;
    None without a reference."""
    advantages: Tensor | None = None
    """[T] of each token, in the place of the batch's; None where those hold."""
    num_weighted: int = 0
    num_outside: float = 0.0
    """Weighted tokens whose ratio is out of bounds."""


def old_policy(
    micro_batch: MicroBatch, proximal: Tensor, importance: ImportanceConfig
) -> OldPolicy:
    """What one micro-batch's update is held against, from the trainer's log-probs [T].

    Collective over context-parallel ranks, each of which has some tokens of every sequence.

    Where every token was sampled from the present weights and only stale ones are weighted, that
    is the log-probs as they are.
    """
    keeps_rollout = importance.stale_logprobs == "rollout" and micro_batch.num_stale > 0
    logprobs = _with_rollout_logprobs(micro_batch, proximal) if keeps_rollout else proximal
    weighted = _weighted_tokens(micro_batch, importance)
    if weighted is None:
        return OldPolicy(proximal=proximal, logprobs=logprobs)
    rows = micro_batch.rows[weighted]
    ratios = importance_ratios(
        proximal[rows],
        micro_batch.logprobs_rollout[weighted],
        torch.from_numpy(micro_batch.sequences).to(rows.device)[weighted],
        num_sequences=len(micro_batch.members),
        level=importance.level,
        add_up=add_up_over_context,
    )
    weights = torch.ones_like(proximal)
    weights[rows] = bounded_weights(ratios, importance)
    return OldPolicy(
        proximal=proximal,
        logprobs=logprobs,
        importance_weights=weights,
        num_weighted=len(weighted),
        num_outside=is_outside(ratios, importance).sum().item(),
    )


def _with_rollout_logprobs(micro_batch: MicroBatch, proximal: Tensor) -> Tensor:
    logprobs = proximal.clone()
    stale = micro_batch.is_stale
    logprobs[micro_batch.rows[stale]] = micro_batch.logprobs_rollout[stale]
    return logprobs


def _weighted_tokens(micro_batch: MicroBatch, importance: ImportanceConfig) -> Tensor | None:
    """Which of the R predicted tokens are weighted, as indices; None without a look at any."""
    recomputes = importance.stale_logprobs == "recompute"
    if importance.scope == "all":
        fresh = micro_batch.is_current
        return torch.nonzero(fresh | micro_batch.is_stale if recomputes else fresh).squeeze(1)
    # not of this rank's tokens alone: all who share the sequences must go on alike
    if recomputes and micro_batch.whole.has_stale:
        return torch.nonzero(micro_batch.is_stale).squeeze(1)
    return None
