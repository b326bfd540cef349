"""The old policy of an update: its log-probs, and importance weights of stale tokens."""

from __future__ import annotations

from dataclasses import replace

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


def old_policy(
    micro_batch: MicroBatch, proximal: Tensor, importance: ImportanceConfig
) -> MicroBatch:
    """Return the micro-batch with its old policy, given the trainer's log-probs [T].

    It is collective over context-parallel ranks, each of which has some tokens of every sequence.
    Without stale tokens, and if only they are weighted, it is just these log-probs.
    """
    logprobs, stale = proximal, micro_batch.is_stale
    if importance.stale_logprobs == "rollout" and micro_batch.num_stale > 0:
        logprobs = proximal.clone()
        logprobs[micro_batch.rows[stale]] = micro_batch.logprobs_rollout[stale]
    weighted = _weighted_tokens(micro_batch, importance)
    if weighted is None:
        return replace(micro_batch, proximal=proximal, logprobs_old=logprobs)
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
    return replace(
        micro_batch,
        proximal=proximal,
        logprobs_old=logprobs,
        importance_weights=weights,
        num_weighted=len(weighted),
        num_outside=is_outside(ratios, importance).sum().item(),
    )


def _weighted_tokens(micro_batch: MicroBatch, importance: ImportanceConfig) -> Tensor | None:
    """Return indices of the weighted tokens among the R predicted; None skips the weighting."""
    recomputes = importance.stale_logprobs == "recompute"
    if importance.scope == "all":
        fresh = micro_batch.is_current
        return torch.nonzero(fresh | micro_batch.is_stale if recomputes else fresh).squeeze(1)
    # over all context-parallel ranks, as all of them must take the same branch
    if recomputes and micro_batch.has_stale:
        return torch.nonzero(micro_batch.is_stale).squeeze(1)
    return None
