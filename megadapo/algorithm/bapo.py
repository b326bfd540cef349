"""BAPO's clip bounds (arXiv 2510.18927): moved until positive tokens reach a target share.

The sums for every pair of bounds on the grid are collected once, between the grid's edges. They add
up over micro-batches and ranks, and the search is then arithmetic, the same on every rank. This is
algorithm 1 of the paper; docs/algorithms.md compares it with the official code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from megadapo.algorithm.objective import PolicyObjective
from megadapo.section import Section

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-6
"""Share of a step by which a range may miss a whole number of steps."""

BoundGrid = Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
"""First value, last value and step of a bound."""


class BapoConfig(Section, title="algorithm.bapo"):
    """Bounds of the ratio itself, not offsets from 1, each moved in steps over its range."""

    target_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Share of the positive tokens at which the search stops."""
    statistic: Literal["share", "gradient_share", "logit_share", "official"] = "gradient_share"
    """Quantity of the share. gradient_share: the size of the loss of the tokens with a gradient;
    logit_share: the size of that gradient in the logits; share: the clipped loss of all tokens;
    official: as share, lower bound moved first, as in the authors' code."""
    low: BoundGrid = (0.6, 0.9, 0.02)
    """Lower bound of the ratio: at the start of the search, its largest value, and its step."""
    high: BoundGrid = (1.2, 3.0, 0.05)
    """Upper bound of the ratio: at the start of the search, its largest value, and its step."""

    def conflicts(self) -> Iterator[str]:
        for key, range_, outer in (("low", self.low, (0.0, 1.0)), ("high", self.high, (1.0, inf))):
            smallest, largest, step = range_
            if not outer[0] <= smallest <= largest <= outer[1] or step <= 0.0:
                yield (
                    f"algorithm.bapo.{key} = {list(range_)} must be [first, last, step] with "
                    f"{outer[0]:g} <= first <= last <= {outer[1]:g} and a step above 0"
                )

    @property
    def counts_gradients(self) -> bool:
        """Whether only tokens with a gradient count."""
        return self.statistic in ("gradient_share", "logit_share")

    @property
    def low_edges(self) -> np.ndarray:
        """All lower bounds, ascending."""
        return _edges(*self.low)

    @property
    def high_edges(self) -> np.ndarray:
        """All upper bounds, ascending."""
        return _edges(*self.high)


def _edges(smallest: float, largest: float, step: float) -> np.ndarray:
    """Return all bounds from the smallest to the largest, ascending."""
    # multiplied, because rounding of many additions could lose a step
    counts = np.arange(int((largest - smallest) / step + _ROUNDING) + 1)
    return np.asarray(np.round(smallest + step * counts, 12))


@dataclass(frozen=True, kw_only=True)
class BapoBounds:
    """Clip bounds of one update, and the positive tokens' share."""

    low: float
    high: float
    share_before: float
    """Share of the positive tokens at the first bounds of the search; NaN without any token."""
    share: float
    """Share at these bounds; below the target if no bounds on the grid reach it."""

    def put_into(self, objective: PolicyObjective) -> PolicyObjective:
        """Return the objective with these clip bounds."""
        bounds = {"clip_low": 1.0 - self.low, "clip_high": self.high - 1.0}
        return objective.model_copy(update=bounds)


def bapo_sums(
    ratios: Tensor, advantages: Tensor, config: BapoConfig, *, dual_clip: float | None = None
) -> Tensor:
    """Return tokens' part of the sums between the grid's edges, float64; add over all tokens.

    Bin k of the upper bounds has ratios above edge k - 1 and up to edge k; bin k of the lower
    bounds those from edge k - 1 up to but without edge k. The order is: sums of r |A| and of |A| in
    the upper bins, for A > 0, then in the lower bins, for A < 0.

    Args:
        ratios: [N] fp32, clamped as in the loss.
        advantages: [N] times the tokens' weights in the loss; for "logit_share" times the
            distances of onehot and probabilities too.
        dual_clip: largest ratio of a negative token, beyond which it has no gradient.
    """
    import torch

    if dual_clip is not None:
        cut = (advantages < 0) & (ratios > dual_clip)
        if config.counts_gradients:
            advantages = advantages.masked_fill(cut, 0.0)
        ratios = ratios.masked_fill(cut, dual_clip)
    sizes = advantages.abs().double()
    sums = []
    for edges, is_upper in ((config.high_edges, True), (config.low_edges, False)):
        # in the dtype of the ratios, as the head compares them
        bounds = torch.from_numpy(edges).to(ratios)
        chosen = advantages > 0 if is_upper else advantages < 0
        bins = torch.bucketize(ratios[chosen], bounds, right=not is_upper)
        weights = sizes[chosen]
        values = torch.stack([ratios[chosen].double() * weights, weights])
        # a product: scattered additions have different bits on every run of a GPU
        is_in = bins[:, None] == torch.arange(len(edges) + 1, device=bins.device)
        sums.append((values @ is_in.double()).flatten())
    return torch.cat(sums)


def num_bapo_sums(config: BapoConfig) -> int:
    """Return the length of `bapo_sums`."""
    return 2 * (len(config.high_edges) + 1) + 2 * (len(config.low_edges) + 1)


def search_bounds(sums: np.ndarray, config: BapoConfig) -> BapoBounds:
    """Move the bounds until positive tokens reach the target share or the grid ends.

    Args:
        sums: `bapo_sums` of all tokens of a mini-batch, added up.
    """
    lows, highs = config.low_edges, config.high_edges
    positive, negative = _sizes(sums, config)

    def share(low: int, high: int) -> float:
        total = positive[high] + negative[low]
        return float(positive[high] / total) if total else float("nan")

    path = _path(len(lows), len(highs), lower_first=config.statistic == "official")
    reached = (pair for pair in path if not share(*pair) < config.target_share)
    low, high = next(reached, path[-1])
    return BapoBounds(
        low=float(lows[low]),
        high=float(highs[high]),
        share_before=share(0, 0),
        share=share(low, high),
    )


def _path(num_low: int, num_high: int, *, lower_first: bool) -> list[tuple[int, int]]:
    """Return the pairs of bounds in search order: all of one side, then of the other."""
    if lower_first:
        first = [(low, 0) for low in range(num_low)]
        return first + [(num_low - 1, high) for high in range(1, num_high)]
    first = [(0, high) for high in range(num_high)]
    return first + [(low, num_high - 1) for low in range(1, num_low)]


def _sizes(sums: np.ndarray, config: BapoConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the positive tokens' term at each upper bound and the negative ones' at each lower.

    For min(r A, clip(r) A) they are sum A min(r, high) and sum |A| max(r, low). For tokens that
    keep their gradient they are sum A r over r <= high and sum |A| r over r >= low.
    """
    lows, highs = config.low_edges, config.high_edges
    cuts = np.cumsum([len(highs) + 1, len(highs) + 1, len(lows) + 1])
    moved_up, size_up, moved_down, size_down = np.split(sums, cuts)
    below = moved_up.cumsum()[:-1]  # r <= high
    above = moved_down[::-1].cumsum()[::-1][1:]  # r >= low
    if config.counts_gradients:
        return below, above
    beyond_high = size_up[::-1].cumsum()[::-1][1:]
    beyond_low = size_down.cumsum()[:-1]
    return below + highs * beyond_high, above + lows * beyond_low
