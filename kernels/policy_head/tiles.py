"""Inputs and outputs of the row passes: a tile of logits, and values per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_STATS = 5
"""Stats per row and shard: max, sum of e^(z - max), target logit, sum of e^(z - max) (z - max), and
sum of e^(2 (z - max)) over all columns but the target."""

MASKED_LOGIT = -1e30
"""Logit of a padded vocabulary row: below every real one and finite, so that 0 * it is not NaN."""


@dataclass(frozen=True, kw_only=True)
class VocabShards:
    """This rank's shards of the vocabulary: local column c is in global shard first + c // size."""

    size: int
    num_local: int
    num_total: int
    first: int
    vocab_size: int
    """True vocabulary size; later global columns are padding."""

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
class Tile:
    """Logits of some tokens over this rank's part of the vocabulary."""

    logits: Tensor  # [R, V/p] fp32
    targets: Tensor  # [R] int64, ids of the whole vocabulary
    shards: VocabShards
    temperature: float

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / self.temperature


@dataclass(frozen=True)
class RowOutputs:
    """Per-token results, each [R]; filled tile by tile."""

    logprobs: Tensor
    entropy: Tensor
    distance: Tensor
    """||onehot(target) - p||."""
    loss: Tensor
    d_policy: Tensor
    ratio: Tensor
    flags: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> RowOutputs:
        values = torch.zeros(6, num_rows, dtype=torch.float32, device=device)
        flags = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        return cls(*[*values, flags])

    def rows(self, rows: slice) -> RowOutputs:
        """Return a view of some rows."""
        return RowOutputs(**{name: value[rows] for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Values of each token that the objective reads: [T] from the caller, fp32 [R] in the head."""

    logprobs_old: Tensor
    """With a sequence ratio, the log of the ratio of the token's sequence."""
    advantages: Tensor
    loss_weights: Tensor
    logprobs_ref: Tensor | None
    importance_weights: Tensor | None
    penalties: Tensor | None = None
    """Coefficients of |log-prob - old log-prob|, which gate "kl_cov" adds to the policy term."""

    def map(self, change: Callable[[Tensor], Tensor]) -> PolicyInputs:
        """Return the inputs with `change` applied to every tensor."""
        ref, weights, penalties = self.logprobs_ref, self.importance_weights, self.penalties
        return PolicyInputs(
            logprobs_old=change(self.logprobs_old),
            advantages=change(self.advantages),
            loss_weights=change(self.loss_weights),
            logprobs_ref=None if ref is None else change(ref),
            importance_weights=None if weights is None else change(weights),
            penalties=None if penalties is None else change(penalties),
        )

    def rows(self, rows: slice) -> PolicyInputs:
        """Return a view of some rows."""
        return self.map(lambda value: value[rows])
