"""What the row passes read and fill: a tile of logits, inputs and outputs of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_STATS = 4
"""Per row and shard: maximum, sum of e^(z - max), target's logit, sum of e^(z - max) (z - max)."""

MASKED_LOGIT = -1e30
"""The logit of a padded vocabulary row: below every real one, and still finite when squared
differences are not taken, so that 0 * MASKED_LOGIT stays 0 and no NaN appears."""


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
class Tile:
    """The logits of some tokens over this rank's part of the vocabulary."""

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

    def rows(self, rows: slice) -> RowOutputs:
        """A view of some rows."""
        return RowOutputs(**{name: value[rows] for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What the objective needs of each token: [T] from the caller, fp32 [R] in the head."""

    logprobs_old: Tensor
    advantages: Tensor
    loss_weights: Tensor
    logprobs_ref: Tensor | None
    importance_weights: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> PolicyInputs:
        """The same with every tensor changed."""
        ref, weights = self.logprobs_ref, self.importance_weights
        return PolicyInputs(
            logprobs_old=change(self.logprobs_old),
            advantages=change(self.advantages),
            loss_weights=change(self.loss_weights),
            logprobs_ref=None if ref is None else change(ref),
            importance_weights=None if weights is None else change(weights),
        )

    def rows(self, rows: slice) -> PolicyInputs:
        """A view of some rows."""
        return self.map(lambda value: value[rows])
