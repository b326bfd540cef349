"""Where responses branch: at tool calls behind which the policy is less sure than at the start.

ARPO (arXiv 2507.19849), Algorithm 1 with equations 3 to 5. Decisions follow from finished responses
alone, so they are the same whatever the engines' number, speed and order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.groups import Branch
from megadapo.rollout.branching_config import BranchingConfig
from megadapo.rollout.types import LogprobTable, Response


def normalized_entropy(table: LogprobTable, *, num_tokens: int, vocab_size: int) -> float:
    """Mean entropy of the first positions of a table, over log V; NaN where there are none.

    Summed over a position's most probable tokens alone, and so at most the whole entropy.

    Args:
        table: at every position the sampled token, and then the most probable ones.
        num_tokens: positions to look at.
        vocab_size: V.
    """
    bounds = list(zip(table.start_indices, table.end_indices, strict=True))[:num_tokens]
    if not bounds:
        return math.nan
    total = 0.0
    for start, end in bounds:
        logprobs = np.array(table.logprobs[start + 1 : end], dtype=np.float64)
        probabilities = np.exp(logprobs)
        # 0 log 0 is 0
        total -= float((probabilities * np.where(probabilities > 0, logprobs, 0.0)).sum())
    return total / len(bounds) / math.log(vocab_size)


def branch_probability(entropy_rise: float, config: BranchingConfig) -> float:
    """alpha + beta dH, dH the normalised entropy behind a call less that of the start."""
    return config.alpha + config.beta * entropy_rise


def choose_branches(
    responses: Sequence[Response],
    seeds: Sequence[int],
    config: BranchingConfig,
    *,
    num_seen: int,
    num_left: int,
) -> list[Branch]:
    """Where a group's next responses branch off the ones it has.

    The first calls of all responses come first, then the second ones, and so on: as if the
    responses were written side by side.

    Args:
        responses: finished ones.
        seeds: of the responses, for draws.
        num_seen: how many of them were looked at before.
        num_left: responses that the group may still have.

    Returns:
        One for each response to come, at most `num_left`.
    """
    points = sorted(
        (turn, index, call.end)
        for index, response in enumerate(responses[num_seen:], start=num_seen)
        for turn, call in enumerate(response.calls)
        if call.end > (response.branch.num_tokens if response.branch else 0)
        and _forks(call.entropy - response.entropy, seeds[index], call.end, config)
    )
    branches = [Branch(parent=index, num_tokens=end) for _, index, end in points]
    return [one for one in branches for _ in range(config.beam_size - 1)][:num_left]


def _forks(rise: float, seed: int, place: int, config: BranchingConfig) -> bool:
    """Never where an entropy could not be measured, as NaN is above nothing."""
    probability = branch_probability(rise, config)
    if config.decision == "threshold":
        return probability > config.threshold
    digest = hashlib.sha256(f"{seed}/branch/{place}".encode()).digest()
    return probability > int.from_bytes(digest[:8], "little") / 2.0**64
