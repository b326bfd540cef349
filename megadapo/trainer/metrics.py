"""Sums that a mini-batch's statistics are made of, and their reduction over all ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

import torch

from megadapo.trainer.result import UpdateResult


@dataclass(kw_only=True)
class MiniBatchSums:
    """Sums and maxima over the trained tokens of one mini-batch."""

    loss: float = 0.0
    num_tokens: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    token_probability: float = 0.0
    logprob: float = 0.0
    num_compared: float = 0.0
    """Tokens sampled from the present weights, whose two log-probs must agree."""
    logprob_difference: float = 0.0
    max_ratio_error: float = 0.0
    max_logprob_difference: float = 0.0

    def reduced(self, *, contributes: bool, device: torch.device) -> MiniBatchSums:
        """The sums over the ranks that contribute; collective over all ranks, the same on all.

        Tensor-parallel ranks hold the same numbers, so only one of them may contribute.
        """
        own = self if contributes else MiniBatchSums()
        names = [field.name for field in fields(self)]
        maxima = [name for name in names if name.startswith("max_")]
        sums = [name for name in names if name not in maxima]
        values = asdict(own)
        total = _all_reduce([values[n] for n in sums], torch.distributed.ReduceOp.SUM, device)
        # a maximum loses NaN, infinity it does not
        bounded = [math.inf if math.isnan(values[n]) else values[n] for n in maxima]
        largest = _all_reduce(bounded, torch.distributed.ReduceOp.MAX, device)
        return MiniBatchSums(**dict(zip(sums + maxima, total + largest, strict=True)))


def _all_reduce(
    values: list[float], op: torch.distributed.ReduceOp.RedOpType, device: torch.device
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, op=op)
    reduced: list[float] = tensor.tolist()
    return reduced


def summarize(
    mini_batches: list[MiniBatchSums],
    *,
    grad_norms: list[float],
    skipped_updates: int,
    num_dropped_tokens: int,
    lr: float,
) -> UpdateResult:
    """The step's result from its mini-batches' reduced sums, in order.

    Args:
        grad_norms: of the applied updates.
    """

    def total(name: str) -> float:
        values: list[float] = [getattr(sums, name) for sums in mini_batches]
        return sum(values)

    tokens, compared = total("num_tokens"), total("num_compared")
    return UpdateResult(
        loss=_ratio(total("loss"), len(mini_batches)),
        entropy=_ratio(total("entropy"), tokens),
        ratio_mean=_ratio(total("ratio"), tokens),
        ratio_first_max_error=mini_batches[0].max_ratio_error if mini_batches else math.nan,
        clip_low_fraction=_ratio(total("clipped_low"), tokens),
        clip_high_fraction=_ratio(total("clipped_high"), tokens),
        token_probability_mean=_ratio(total("token_probability"), tokens),
        logprob_mean=_ratio(total("logprob"), tokens),
        grad_norm=_ratio(sum(grad_norms), len(grad_norms)),
        lr=lr,
        skipped_updates=skipped_updates,
        num_dropped_tokens=num_dropped_tokens,
        logprob_abs_mean=_ratio(total("logprob_difference"), compared),
        logprob_abs_max=(
            max(sums.max_logprob_difference for sums in mini_batches) if compared else math.nan
        ),
        tokens_trained=int(tokens),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
