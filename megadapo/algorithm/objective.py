"""The per-token policy objective: its numbers and its plain torch definition.

Source: DAPO (arXiv 2503.14476) equation 8 for the decoupled clip; dual clip from
"Mastering Complex Control in MOBA Games" (arXiv 1912.09729) equation 5; the k1, k2 and k3
estimators of the KL divergence from Schulman's "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megadapo.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""The log-ratio is clamped to +-20: exp(20) is far outside any clip window and still finite."""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with its options."""

    clip_low: float = 0.2
    """How far the ratio may fall below 1 before its gradient is cut (A < 0)."""
    clip_high: float = 0.28
    """How far the ratio may rise above 1 before its gradient is cut (A > 0)."""
    dual_clip: float | None = None
    """Upper bound c > 1 on the ratio where the advantage is negative; none in the paper."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus that is subtracted from the loss, in nats."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference policy; DAPO uses none."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence from one sampled token."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low < 1.0:
            raise ConfigError(f"algorithm.objective.clip_low = {self.clip_low} is not in [0, 1)")
        if self.clip_high < 0.0:
            raise ConfigError(f"algorithm.objective.clip_high = {self.clip_high} is negative")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ConfigError(f"algorithm.objective.dual_clip = {self.dual_clip} is not above 1")
        if self.entropy_coef < 0.0 or self.kl_coef < 0.0:
            raise ConfigError(
                "algorithm.objective.entropy_coef and algorithm.objective.kl_coef must not be "
                "negative"
            )
