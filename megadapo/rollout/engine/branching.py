"""Branching points: calls after which the policy is less certain than at the start.

ARPO (arXiv 2507.19849), Algorithm 1 with equations 3 to 5. Decisions depend on finished responses
only, not on the engines' number, speed or order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.groups import Branch
from megadapo.data.group import Response
from megadapo.rollout.config import BranchingConfig
from megadapo.rollout.types import LogprobTable

ALPHA = 0.5
"""Probability of a branch if the entropy has not risen since the response's start."""
BETA = 0.2
"""Increase of that probability per unit of normalized entropy."""
THRESHOLD = 0.5
"""Probability above which a response branches (tau). These three values are those of the paper and
of the authors' code."""


def normalized_entropy(table: LogprobTable, *, num_tokens: int, vocab_size: int) -> float:
    """Return the mean entropy of the first positions divided by log V; NaN without positions.

    The sum runs over a position's most probable tokens, so it is at most the full entropy.

    Args:
        table: at every position the sampled token, then the most probable ones.
        num_tokens: largest number of positions.
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


def choose_branches(
    responses: Sequence[Response],
    seeds: Sequence[int],
    config: BranchingConfig,
    *,
    num_seen: int,
    num_left: int,
) -> list[Branch]:
    """Return the points at which a group's next responses branch off the existing ones.

    The first calls of all responses come first, then the second ones, and so on.

    Args:
        responses: finished responses.
        seeds: seeds of the responses, for draws.
        num_seen: number of leading responses that an earlier call has considered.
        num_left: number of responses that the group may still have.

    Returns:
        One branch per new response, at most `num_left`.
    """
    points = sorted(
        (turn, index, call.end)
        for index, response in enumerate(responses[num_seen:], start=num_seen)
        for turn, call in enumerate(response.turns)
        if call.is_call
        and call.end > (response.branch.num_tokens if response.branch else 0)
        and _has_branch(call.entropy - response.entropy, seeds[index], call.end, config)
    )
    branches = [Branch(parent=index, num_tokens=end) for _, index, end in points]
    return [branch for branch in branches for _ in range(config.beam_size - 1)][:num_left]


def response_prefix(response: Response, num_tokens: int, *, num_prompt: int) -> Response:
    """Return the first tokens of a response, with the turns among them.

    The last token has no experts yet: the request that continues the prefix reads it.

    Args:
        num_prompt: number of prompt tokens before the response.
    """
    experts = response.experts
    return Response(
        token_ids=response.token_ids[:num_tokens],
        logprobs=response.logprobs[:num_tokens],
        finish_reason="unfinished",
        text="",
        policy_versions=response.policy_versions[:num_tokens],
        turns=tuple(call for call in response.turns if call.end <= num_tokens),
        entropy=response.entropy,
        experts=None if experts is None else experts[: num_prompt + num_tokens - 1],
    )


def _has_branch(rise: float, seed: int, end: int, config: BranchingConfig) -> bool:
    # if an entropy was not measured, the rise is NaN and no comparison holds
    if config.decision == "threshold":
        return ALPHA + BETA * rise > THRESHOLD
    # the authors' beta is for entropies summed over the positions. A mean times their number is
    # that sum, and after a call with fewer tokens it does not fall with their number
    probability = ALPHA + BETA * config.num_tokens * rise
    digest = hashlib.sha256(f"{seed}/branch/{end}".encode()).digest()
    return probability > int.from_bytes(digest[:8], "little") / 2.0**64
