"""Spread of an objective's gradient over tokens: sizes in log-prob space and in logit space.

A token's policy term has the derivative d in the token's log-prob and the loss weight w. Its
gradient has the size |w d| in log-prob space, and |w d| ||onehot - p|| in the logits (divided by
the temperature). An aggregation chooses w; the distance ||onehot - p|| spans decades by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.observe.metrics.records import plain_numbers
from megadapo.observe.tables import TextTable, formatted

RARE, LIKELY = 0.2, 0.9
"""Probabilities below and above which a token is rare or likely."""
TOP = 0.01
"""Share of the tokens with the largest gradients."""


@dataclass(frozen=True, kw_only=True)
class GradientSizes:
    """The sizes of the tokens' gradients under one objective; None without any gradient.

    Sizes and shares are of the gradients in the logits, but for the first two.
    """

    spread: float | None
    """Largest size in log-prob space, in medians."""
    positive_in_logprobs: float | None
    """Share of tokens with a positive advantage in log-prob space."""
    median: float | None
    p99: float | None
    largest: float | None
    top: float | None
    """Share of the `TOP` tokens with the largest sizes."""
    rare: float | None
    likely: float | None
    positive: float | None
    longest: float | None
    """Share of the responses that are at least as long as three quarters of all."""
    last: float | None
    """Share of the last quarter of each response."""


def gradient_sizes(
    d_policy: np.ndarray, distance: np.ndarray, logprobs: np.ndarray, batch: PackedBatch
) -> GradientSizes:
    """Measure the gradients of one objective.

    Args:
        d_policy: [T] float32, derivative of the weighted loss in each token's log-prob; NaN on
            tokens without a loss.
        distance: [T] float32, ||onehot - p||.
        logprobs: [T] float32 under the weights of the gradient.
        batch: the objective's, with its advantages.
    """
    kept = np.flatnonzero(np.isfinite(d_policy) & (d_policy != 0.0))
    if not len(kept):
        return GradientSizes(**dict.fromkeys(GradientSizes.__dataclass_fields__))
    in_logprobs = np.abs(d_policy[kept].astype(np.float64))
    sizes = in_logprobs * distance[kept]
    sequences = np.searchsorted(batch.cu_seqlens, kept, side="right") - 1
    starts = (batch.cu_seqlens[:-1] + batch.prompt_lengths)[sequences]
    lengths = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1] - batch.prompt_lengths
    is_long = (lengths >= np.quantile(lengths, 0.75))[sequences]
    is_late = (kept - starts) >= 0.75 * lengths[sequences]
    probabilities, is_positive = np.exp(logprobs[kept]), batch.advantages[kept] > 0

    def share(chosen: np.ndarray, of: np.ndarray = sizes) -> float | None:
        return float(of[chosen].sum() / of.sum()) if of.sum() else None

    median, p99 = np.quantile(sizes, [0.5, 0.99])
    return GradientSizes(
        spread=float(in_logprobs.max() / np.median(in_logprobs)),
        positive_in_logprobs=share(is_positive, in_logprobs),
        median=float(median),
        p99=float(p99),
        largest=float(sizes.max()),
        top=share(np.argsort(sizes)[-max(1, round(TOP * len(sizes))) :]),
        rare=share(probabilities < RARE),
        likely=share(probabilities > LIKELY),
        positive=share(is_positive),
        longest=share(is_long),
        last=share(is_late),
    )


_COLUMNS = (
    ("max / median |w d|", "spread", ".2f"),
    ("A > 0 of |w d|", "positive_in_logprobs", ".1%"),
    ("median", "median", ".1e"),
    ("p99", "p99", ".1e"),
    ("max", "largest", ".1e"),
    (f"top {TOP:.0%}", "top", ".1%"),
    (f"p < {RARE}", "rare", ".1%"),
    (f"p > {LIKELY}", "likely", ".1%"),
    ("A > 0", "positive", ".1%"),
    ("longest 25%", "longest", ".1%"),
    ("last 25%", "last", ".1%"),
)
"""Head, field of `GradientSizes` and format of each column."""


def sizes_table(objectives: Sequence[tuple[str, GradientSizes]]) -> str:
    """Return one row per objective."""
    rows = [
        [name, *(formatted(getattr(sizes, field), form) for _, field, form in _COLUMNS)]
        for name, sizes in objectives
    ]
    title = "sizes of the tokens' gradients: two columns in log-probs, then in the logits"
    head = ["objective", *(label for label, _, _ in _COLUMNS)]
    return TextTable(title=title, head=head, rows=rows).text()


def sizes_json(objectives: Sequence[tuple[str, GradientSizes]]) -> list[dict[str, Any]]:
    """Return the numbers of `sizes_table` as JSON values."""
    return [plain_numbers({"name": name, **asdict(sizes)}) for name, sizes in objectives]
