"""How tokens are trained that other weights sampled: importance weights on the policy term.

A token has up to three log-probs: mu, the engine's when it sampled the token (the behaviour
policy); pi_prox, the trainer's before the step's first update (the proximal policy); and pi, the
trainer's in the update. Recomputed, the token's policy term is

    w * -min(r A, clip(r) A)    with r = pi / pi_prox and w = bound(pi_prox / mu), a constant,

so the clip limits how far the step moves the policy and w makes up for who sampled the token.
With the rollout's own log-probs there is one ratio, r = pi / mu, no weight, and the clip cuts
whatever has drifted out of its window already.

Source: decoupled PPO (arXiv 2110.00641), used on stale rollouts by AReaL (arXiv 2505.24298);
truncation of the weight: Ionides, "Truncated Importance Sampling" (2008); the geometric mean over
a sequence: GSPO (arXiv 2507.18071).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megadapo.algorithm.objective import MAX_LOG_RATIO
from megadapo.algorithm.ratios import sequence_means
from megadapo.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceConfig(Section, title="algorithm.importance"):
    """Tokens that earlier weights sampled (stale), or an engine that computes otherwise."""

    stale_logprobs: Literal["recompute", "rollout", "none"] = "recompute"
    """What the ratio of a stale token is taken against: the trainer's present log-prob, with an
    importance weight; or the engine's own at sampling, without one; or nothing, which leaves the
    token out of the loss."""
    level: Literal["token", "sequence"] = "token"
    """Ratio behind a weight: the token's own, or the geometric mean over the tokens of its response
    that are weighted."""
    bound: Literal["truncate", "mask", "none"] = "truncate"
    """What happens to a weight outside of low to high: moved to the bound, set to 0, or nothing."""
    low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Lower bound of a weight."""
    high: Annotated[float, Field(ge=1.0)] = 2.0
    """Upper bound of a weight."""
    scope: Literal["stale", "all"] = "stale"
    """Tokens that are weighted: stale ones only, or fresh ones too, which corrects for an engine
    whose log-probs differ from the trainer's (bfloat16)."""

    def conflicts(self) -> Iterator[str]:
        unused = self.changed("level", "bound", "low", "high")
        if self.stale_logprobs != "recompute" and self.scope == "stale" and unused:
            keys = ", ".join(f"algorithm.importance.{name}" for name in unused)
            yield (
                f"{keys}: no token is weighted with algorithm.importance.stale_logprobs = "
                f'"{self.stale_logprobs}" and scope = "stale"; leave the keys out, or weight '
                'tokens with stale_logprobs = "recompute" or scope = "all"'
            )


def importance_ratios(
    logprobs: Tensor,
    logprobs_rollout: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    level: Literal["token", "sequence"],
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """pi_prox / mu of each of N weighted tokens, [N] fp32.

    Log-ratios are clamped to +-MAX_LOG_RATIO. At the level of the sequence the ratio is
    exp(mean log-ratio) over the sequence's N_i tokens among these: the product over thousands of
    tokens would be 0 or the bound for any mismatch.

    Args:
        logprobs: [N] the trainer's before the step's first update.
        logprobs_rollout: [N] the engine's, finite.
        sequences: [N] int64, which of `num_sequences` sequences a token is of; all of the weighted
            tokens of a sequence must be here, or where `add_up` reaches.
        num_sequences: S, an upper bound.
        level: of the token or of the sequence.
        add_up: as in `ratios.sequence_means`; called at the level of the sequence.
    """
    log_ratios = (logprobs - logprobs_rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "token":
        return log_ratios.exp()
    means = sequence_means(log_ratios, sequences, num_sequences=num_sequences, add_up=add_up)
    return means.exp().to(log_ratios.dtype)[sequences]


def is_outside(ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Whether a ratio is out of bounds, [N] bool; never where there are none."""
    outside = (ratios < config.low) | (ratios > config.high)
    return outside & (config.bound != "none")


def bounded_weights(ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """The weight of each token, [N], from its ratio; NaN stays NaN.

    A weight of 0 takes the token out of the sum and not out of what the sum is divided by: loss
    weights come from the counts of the whole mini-batch, before anything is known of ratios, and
    what is left must not weigh more for what was masked.
    """
    if config.bound == "truncate":
        return ratios.clamp(config.low, config.high)
    return ratios.masked_fill(is_outside(ratios, config), 0.0)
