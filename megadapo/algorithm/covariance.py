"""Tokens whose log-prob and advantage covary most: the choice of gates "clip_cov" and "kl_cov".

arXiv 2505.22617, section 4: these tokens lower the entropy most. The rule is verl's
(0.8.0.dev, verl/trainer/ppo/core_algos.py, compute_policy_loss_clip_cov and _kl_cov, commit
b178a3cd), but over a whole mini-batch instead of a micro-batch, and with a repeatable draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective


def choose_tokens(
    logprobs: np.ndarray,
    logprobs_old: np.ndarray,
    advantages: np.ndarray,
    objective: PolicyObjective,
    *,
    draw: Sequence[int],
) -> np.ndarray:
    """Return [N] bool: tokens that the gate leaves out (clip_cov) or penalises (kl_cov).

    clip_cov draws among the tokens that are between the bounds and not clipped. Each token has a
    number from `draw` and its place, and the lowest ones are chosen: a token that rounding moves
    over a bound changes no other token's number.

    Args:
        logprobs: [N] of all tokens of a mini-batch that have a loss, in the order of the batch,
            under the weights before the update.
        draw: seeds of the draw, such as those of the run, the step and the update.
    """
    if not len(logprobs):
        return np.zeros(0, dtype=np.bool_)
    logprobs, advantages = logprobs.astype(np.float64), advantages.astype(np.float64)
    found = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    num = max(1, int(objective.cov_share * len(found)))
    if objective.gate == "kl_cov":
        # stable: of equal ones the first in the batch
        order = np.argsort(-found, kind="stable")
    else:
        ratios = np.exp(np.minimum(logprobs - logprobs_old, MAX_LOG_RATIO))
        is_clipped = (advantages > 0) & (ratios > 1.0 + objective.clip_high)
        is_clipped |= (advantages < 0) & (ratios < 1.0 - objective.clip_low)
        is_inside = (found > objective.cov_low) & (found < objective.cov_high) & ~is_clipped
        numbers = np.random.default_rng(draw).random(len(found))
        inside = np.flatnonzero(is_inside)
        order = inside[np.argsort(numbers[inside], kind="stable")]
    chosen = np.zeros(len(found), dtype=np.bool_)
    chosen[order[:num]] = True
    return chosen
