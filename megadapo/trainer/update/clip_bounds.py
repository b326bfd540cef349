"""BAPO's clip bounds of each update of a step: sums over every rank, then arithmetic."""

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
from megadapo.algorithm.objective import MAX_LOG_RATIO
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy


class BoundSearch:
    """Finds the bounds of one update after the other; every rank calls it as often."""

    def __init__(
        self,
        config: BapoConfig,
        *,
        score: Callable[[Sequence[MicroBatch]], list[Tensor]],
        contributes: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            score: log-probs [T] of micro-batches under the present weights.
            contributes: whether this rank's tokens count; tensor-parallel ranks have the same.
            device: of the sums.
        """
        self._config = config
        self._score = score
        self._contributes = contributes
        self._sums = torch.zeros(num_bapo_sums(config), dtype=torch.float64, device=device)
        self._is_first = True

    def bounds(self, micro_batches: Sequence[MicroBatch], old: Sequence[OldPolicy]) -> BapoBounds:
        """The bounds of the next update of the step; collective, with one sum over all ranks."""
        if self._config.scope == "minibatch":
            # before the first update the present log-probs are those that were just taken
            present = (
                [policy.proximal for policy in old]
                if self._is_first
                else self._score(micro_batches)
            )
            self._sums = self._own_sums(micro_batches, old, present)
        self._is_first = False
        total = self._sums.clone()
        torch.distributed.all_reduce(total)
        return search_bounds(total.cpu().numpy(), self._config)

    def observe(
        self,
        micro_batches: Sequence[MicroBatch],
        old: Sequence[OldPolicy],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Keep what an update saw, for the bounds of the update behind it where they lag."""
        if self._config.scope == "lagged":
            self._sums = self._own_sums(micro_batches, old, logprobs)

    def _own_sums(
        self,
        micro_batches: Sequence[MicroBatch],
        old: Sequence[OldPolicy],
        logprobs: Sequence[Tensor],
    ) -> Tensor:
        total = torch.zeros_like(self._sums)
        if not self._contributes:
            return total
        for triple in zip(micro_batches, old, logprobs, strict=True):
            total += sums_of(*triple, self._config)
        return total


def sums_of(
    micro_batch: MicroBatch, old: OldPolicy, logprobs: Tensor, config: BapoConfig
) -> Tensor:
    """`bapo_sums` of a micro-batch's tokens, each as large as its importance weight makes it.

    Tokens that the head leaves out have no part in them.

    Args:
        logprobs: [T] under the present weights.
    """
    known = (micro_batch.loss_weights != 0) & old.logprobs.isfinite()
    advantages = micro_batch.advantages if old.advantages is None else old.advantages
    if old.importance_weights is not None:
        known = known & old.importance_weights.isfinite()
        advantages = advantages * old.importance_weights
    rows = micro_batch.rows[known[micro_batch.rows]]
    log_ratios = (logprobs[rows] - old.logprobs[rows]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bapo_sums(log_ratios.exp(), advantages[rows], config)
