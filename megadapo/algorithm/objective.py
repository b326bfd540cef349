"""The numbers of the per-token policy objective; `reference.py` says what they mean.

Source: DAPO (arXiv 2503.14476) equation 8 for the decoupled clip; dual clip from
"Mastering Complex Control in MOBA Games" (arXiv 1912.09729) equation 5; the k1, k2 and k3
estimators of the KL divergence from Schulman's "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from megadapo.section import Section

MAX_LOG_RATIO = 20.0
"""The log-ratio is clamped to +-20: exp(20) is far outside any clip window and still finite."""


class PolicyObjective(Section, title="algorithm.objective"):
    """l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with its options."""

    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """How far the ratio may fall below 1 before its gradient is cut (A < 0)."""
    clip_high: NonNegativeFloat = 0.28
    """How far the ratio may rise above 1 before its gradient is cut (A > 0)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound c > 1 on the ratio where the advantage is negative; none in the paper."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus that is subtracted from the loss, in nats."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference policy; DAPO uses none."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence from one sampled token."""
