"""BAPO's clip bounds of each update: sums over all ranks, then a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megadapo.algorithm.bapo import (
    BapoBounds,
    BapoConfig,
    bapo_sums,
    num_bapo_sums,
    search_bounds,
)
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.trainer.batch.micro_batch import MicroBatch


class BoundSearch:
    """A search for the clip bounds of one update after another, with gate "bapo"."""

    def __init__(
        self,
        config: BapoConfig,
        *,
        dual_clip: float | None,
        score: Callable[[Sequence[MicroBatch]], list[Tensor]],
        contributes: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            score: computes log-probs [T] of micro-batches under the current weights.
            contributes: whether this rank's tokens count; tensor-parallel ranks have the same.
        """
        self._config, self._dual_clip = config, dual_clip
        self._score = score
        self._contributes = contributes
        self._device = device
        self.found: list[BapoBounds] = []
        """Bounds of the updates so far."""

    def objective(
        self, objective: PolicyObjective, micro_batches: Sequence[MicroBatch]
    ) -> PolicyObjective:
        """Return the objective of the next update with its bounds; collective with gate "bapo"."""
        if objective.gate != "bapo":
            return objective
        # before the first update, the current log-probs are the old ones
        current = self._score(micro_batches) if self.found else None
        total = self._own_sums(micro_batches, current)
        torch.distributed.all_reduce(total)
        bounds = search_bounds(total.cpu().numpy(), self._config)
        self.found.append(bounds)
        return bounds.put_into(objective)

    def _own_sums(
        self, micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor] | None
    ) -> Tensor:
        total = torch.zeros(num_bapo_sums(self._config), dtype=torch.float64, device=self._device)
        if not self._contributes:
            return total
        known = [None] * len(micro_batches) if logprobs is None else logprobs
        for micro_batch, current in zip(micro_batches, known, strict=True):
            total += sums_of(micro_batch, current, self._config, dual_clip=self._dual_clip)
        return total


def sums_of(
    micro_batch: MicroBatch,
    logprobs: Tensor | None,
    config: BapoConfig,
    *,
    dual_clip: float | None = None,
) -> Tensor:
    """Return `bapo_sums` of a micro-batch's tokens with their loss and importance weights.

    Tokens that the head drops do not count.

    Args:
        logprobs: [T] under the current weights; None before the first update: the proximal ones.
    """
    old = micro_batch.logprobs_old
    current = micro_batch.proximal if logprobs is None else logprobs
    assert old is not None and current is not None, "computed before the first update"
    known = (micro_batch.loss_weights != 0) & old.isfinite()
    advantages = micro_batch.advantages * micro_batch.loss_weights
    if micro_batch.importance_weights is not None:
        known = known & micro_batch.importance_weights.isfinite()
        advantages = advantages * micro_batch.importance_weights
    rows = micro_batch.rows[known[micro_batch.rows]]
    log_ratios = (current[rows] - old[rows]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bapo_sums(log_ratios.exp(), advantages[rows], config, dual_clip=dual_clip)
