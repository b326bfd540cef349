"""Results of an update that no trainer made."""

from __future__ import annotations

import math

from megadapo.trainer.types import RankShare, UpdateResult

UPDATE = UpdateResult(
    loss=-0.1,
    entropy=0.2,
    ratio_mean=1.0,
    ratio_first_max_error=0.0,
    clip_low_fraction=0.01,
    clip_high_fraction=0.02,
    dual_clip_fraction=0.03,
    token_probability_mean=0.9,
    positive_gradient_share=0.45,
    logprob_mean=-0.2,
    grad_norm=1.0,
    lr=1e-6,
    skipped_updates=0,
    num_dropped_tokens=0,
    logprob_abs_mean=math.nan,
    logprob_abs_max=math.nan,
    tokens_trained=400,
    shares=(
        RankShare(num_tokens=210, logprobs_seconds=0.5, private_bytes=7 << 20),
        RankShare(num_tokens=190, logprobs_seconds=0.75, private_bytes=9 << 20),
    ),
)
