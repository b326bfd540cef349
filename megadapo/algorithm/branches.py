"""Responses that share a beginning, and the advantage of the tokens they share.

Source: ARPO, Agentic Reinforced Policy Optimization (arXiv 2507.19849). A shared token is in the
batch as often as there are responses that begin with it, so it weighs what they weigh together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megadapo.algorithm.advantages import Advantages
from megadapo.algorithm.config import AlgorithmConfig


class Branch(NamedTuple):
    """Where a response left another one of its group."""

    parent: int
    """Place of the other one in the group; it comes before."""
    num_tokens: int
    """Tokens at the beginning of the response that are the parent's own."""


class BranchedGroup(Protocol):
    """One prompt's G responses; `data.batch.Group` is one."""

    @property
    def lengths(self) -> Sequence[int]:
        """[G] tokens of each response."""
        ...

    @property
    def branches(self) -> Sequence[Branch | None]:
        """[G] where each left another one; None where it began at the prompt."""
        ...

    @property
    def truncated(self) -> Sequence[bool]:
        """[G] whether a response was cut at the length limit."""
        ...


def branch_advantages(
    groups: Sequence[BranchedGroup], values: Advantages, config: AlgorithmConfig
) -> Advantages:
    """The advantages of a step's S responses as they are (soft), or of their tokens (hard)."""
    if config.shared_prefix == "soft":
        return values
    found, start = [], 0
    for group in groups:
        part = values[start : start + len(group.lengths)]
        keep = [not (cut and config.overlong_filtering) for cut in group.truncated]
        found += hard_advantages(part, group.lengths, group.branches, keep=keep)
        start += len(part)
    return found


def hard_advantages(
    values: Sequence[float] | Advantages,
    lengths: Sequence[int],
    branches: Sequence[Branch | None],
    *,
    keep: Sequence[bool] | None = None,
) -> list[np.ndarray]:
    """The advantage of every token of a group's G responses: [n_i] float64 each.

    A token gets the mean over the responses in the loss that share it, a response's own tokens its
    own value, and one that is left out keeps its own.
    Tokens that are equal by chance are not shared. Soft attribution gives every token its
    response's value, and where nothing is clipped and all tokens have one weight the gradient is
    the same.

    Args:
        values: [G] of whole responses, or arrays with those of their tokens.
        lengths: [G] tokens of each response.
        branches: [G] None for a response that began at the prompt.
        keep: [G] False for a response that is left out of the loss; None: there is no such.
    """
    writers = _writers(lengths, branches)
    spread = [np.broadcast_to(value, n) for value, n in zip(values, lengths, strict=True)]
    longest = max(lengths, default=0)
    # a token has a name: who wrote it, and where
    names = np.concatenate([w * longest + np.arange(len(w)) for w in writers]).astype(np.int64)
    _, tokens = np.unique(names, return_inverse=True)
    kept = np.repeat([True] * len(lengths) if keep is None else keep, lengths)
    own = np.concatenate(spread)
    sums = np.bincount(tokens, weights=own * kept)
    counts = np.bincount(tokens, weights=kept)
    means = sums / np.maximum(1.0, counts)
    return np.split(np.where(kept, means[tokens], own), np.cumsum(lengths)[:-1])


def _writers(lengths: Sequence[int], branches: Sequence[Branch | None]) -> list[np.ndarray]:
    """[n_i] which response of the group each token was sampled for first."""
    writers: list[np.ndarray] = []
    for index, (length, branch) in enumerate(zip(lengths, branches, strict=True)):
        own = np.full(length, index, dtype=np.int64)
        if branch is not None:
            own[: branch.num_tokens] = writers[branch.parent][: branch.num_tokens]
        writers.append(own)
    return writers
