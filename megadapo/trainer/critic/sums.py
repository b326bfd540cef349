"""Sums over a step's tokens that the critic's statistics and the whitening are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from megadapo.trainer.result import CriticResult


@dataclass(kw_only=True)
class CriticSums:
    """Sums over the trained tokens of one mini-batch."""

    loss: float = 0.0
    num_tokens: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    returns: float = 0.0
    squared_returns: float = 0.0
    errors: float = 0.0
    squared_errors: float = 0.0

    def add(self, values: Tensor, returns: Tensor) -> None:
        """Count tokens with values [R] before the step's first update and returns [R]."""
        values, returns = values.double(), returns.double()
        errors = returns - values
        self.num_tokens += len(values)
        self.values += values.sum().item()
        self.returns += returns.sum().item()
        self.squared_returns += returns.square().sum().item()
        self.errors += errors.sum().item()
        self.squared_errors += errors.square().sum().item()

    def reduced(self, *, contributes: bool, device: torch.device) -> CriticSums:
        """The sums over the ranks that contribute; collective, the same on all."""
        own = astuple(self if contributes else CriticSums())
        total = torch.tensor(own, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)
        return CriticSums(
            **dict(zip((field.name for field in fields(self)), total.tolist(), strict=True))
        )


def summarize_critic(
    mini_batches: Sequence[CriticSums], *, grad_norms: Sequence[float], lr: float
) -> CriticResult:
    """The critic's numbers of a step from its mini-batches' reduced sums.

    Args:
        grad_norms: of the applied updates.
    """
    total = CriticSums(
        **{
            field.name: sum(getattr(sums, field.name) for sums in mini_batches)
            for field in fields(CriticSums)
        }
    )
    tokens = total.num_tokens
    if not tokens:
        return CriticResult(lr=lr)
    return CriticResult(
        loss=total.loss / len(mini_batches),
        explained_variance=_explained_variance(total),
        value_mean=total.values / tokens,
        return_mean=total.returns / tokens,
        clip_fraction=total.clipped / tokens,
        grad_norm=sum(grad_norms) / len(grad_norms) if grad_norms else None,
        lr=lr,
        skipped_updates=len(mini_batches) - len(grad_norms),
    )


def whitened_over_ranks(
    pieces: Sequence[np.ndarray], *, contributes: bool, device: torch.device
) -> list[np.ndarray]:
    """Numbers less their mean over all ranks, over their unbiased standard deviation; collective.

    Zeros where all are equal. Ranks that do not contribute get their own pieces by the others'
    mean and deviation.

    Args:
        pieces: of this rank, [n] float64 each.
    """
    own = np.concatenate([np.empty(0), *(pieces if contributes else ())])
    count, total = _sums([len(own), own.sum()], device)
    ends = torch.tensor(
        [own.max(initial=-math.inf), -own.min(initial=math.inf)], dtype=torch.float64, device=device
    )
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    largest, smallest = ends[0].item(), -ends[1].item()
    mean = total / max(1.0, count)
    (squares,) = _sums([np.square(own - mean).sum()], device)
    # of a NaN the ends may tell nothing
    if count < 2 or (largest == smallest and math.isfinite(total)):
        return [np.zeros_like(piece) for piece in pieces]
    deviation = math.sqrt(squares / (count - 1))
    return [(piece - mean) / deviation for piece in pieces]


def _sums(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


def _explained_variance(sums: CriticSums) -> float | None:
    """1 - Var(returns - values) / Var(returns); None where all returns are the same."""
    tokens = sums.num_tokens
    of_returns = sums.squared_returns / tokens - (sums.returns / tokens) ** 2
    of_errors = sums.squared_errors / tokens - (sums.errors / tokens) ** 2
    # the difference of two sums has that much rounding
    if of_returns <= 1e-12 * sums.squared_returns / tokens:
        return None
    return 1.0 - of_errors / of_returns
