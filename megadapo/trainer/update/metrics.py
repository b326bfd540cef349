"""Sums that a mini-batch's statistics are made of, and their reduction over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megadapo.algorithm.bapo import BapoBounds
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head.terms import policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.trainer.types import (
    CriticResult,
    ExpertResult,
    ParityCauses,
    PretrainingResult,
    ReferenceKl,
    SearchedBounds,
    Staleness,
    UpdateResult,
)


@dataclass(kw_only=True)
class MiniBatchSums:
    """Sums and maxima over the trained tokens of one mini-batch."""

    loss: float = 0.0
    num_tokens: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    token_probability: float = 0.0
    logprob: float = 0.0
    positive_gradient: float = 0.0
    """Of `gradient`, what is of tokens with a positive advantage."""
    gradient: float = 0.0
    """Size of the policy term's gradient over the log-probs."""
    text_loss: float = 0.0
    """Minus the log-probs of the tokens of texts."""
    num_text_tokens: float = 0.0
    num_compared: float = 0.0
    """Tokens sampled from the present weights, whose two log-probs must agree."""
    logprob_difference: float = 0.0
    num_stale: float = 0.0
    """Tokens sampled from other weights."""
    logprob_drift: float = 0.0
    num_weighted: float = 0.0
    """Tokens with an importance weight."""
    num_outside: float = 0.0
    """Those of them whose ratio is out of bounds."""
    num_with_kl: float = 0.0
    """Tokens that the reference policy scored."""
    kl: float = 0.0
    num_probed: float = 0.0
    """Tokens scored at a second micro-batch shape."""
    num_probed_fresh: float = 0.0
    shape_difference: float = 0.0
    engine_difference: float = 0.0
    max_ratio_error: float = 0.0
    max_logprob_difference: float = 0.0
    max_logprob_drift: float = 0.0
    max_shape_difference: float = 0.0
    max_engine_difference: float = 0.0
    max_kl: float = 0.0

    def reduced(self, *, contributes: bool, device: torch.device) -> MiniBatchSums:
        """The sums over the ranks that contribute; collective over all ranks, the same on all.

        Tensor-parallel ranks hold the same numbers, so only one of them may contribute.
        """
        own = self if contributes else MiniBatchSums()
        names = [field.name for field in fields(self)]
        maxima = [name for name in names if name.startswith("max_")]
        sums = [name for name in names if name not in maxima]
        values = asdict(own)
        total = _all_reduce([values[n] for n in sums], torch.distributed.ReduceOp.SUM, device)
        # a maximum loses NaN, infinity it does not
        bounded = [math.inf if math.isnan(values[n]) else values[n] for n in maxima]
        largest = _all_reduce(bounded, torch.distributed.ReduceOp.MAX, device)
        return MiniBatchSums(**dict(zip(sums + maxima, total + largest, strict=True)))


def _all_reduce(
    values: list[float], op: torch.distributed.ReduceOp.RedOpType, device: torch.device
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, op=op)
    reduced: list[float] = tensor.tolist()
    return reduced


def summarize(
    mini_batches: list[MiniBatchSums],
    *,
    grad_norms: list[float],
    skipped_updates: int,
    num_dropped_tokens: int,
    lr: float,
    version_gaps: np.ndarray,
    importance: ImportanceConfig,
    bounds: Sequence[BapoBounds] = (),
    kl_coef: float = 0.0,
    critic: CriticResult | None = None,
    experts: ExpertResult | None = None,
) -> UpdateResult:
    """The step's result from its mini-batches' reduced sums, in order.

    Args:
        grad_norms: of the applied updates.
        version_gaps: publications between sampling and training of each token of the step.
        importance: how stale tokens were weighted.
        bounds: clip bounds of each update, where they were searched.
        kl_coef: weight of the KL divergence, wherever it entered.
    """

    step = _step_sums(mini_batches)
    tokens, compared = step.num_tokens, step.num_compared
    return UpdateResult(
        loss=_ratio(step.loss, len(mini_batches)),
        entropy=_ratio(step.entropy, tokens),
        ratio_mean=_ratio(step.ratio, tokens),
        ratio_first_max_error=mini_batches[0].max_ratio_error if mini_batches else math.nan,
        clip_low_fraction=_ratio(step.clipped_low, tokens),
        clip_high_fraction=_ratio(step.clipped_high, tokens),
        dual_clip_fraction=_ratio(step.dual_clipped, tokens),
        token_probability_mean=_ratio(step.token_probability, tokens),
        logprob_mean=_ratio(step.logprob, tokens),
        positive_gradient_share=_ratio(step.positive_gradient, step.gradient),
        grad_norm=_ratio(sum(grad_norms), len(grad_norms)),
        lr=lr,
        skipped_updates=skipped_updates,
        num_dropped_tokens=num_dropped_tokens,
        logprob_abs_mean=_ratio(step.logprob_difference, compared),
        logprob_abs_max=step.max_logprob_difference if compared else math.nan,
        tokens_trained=int(tokens),
        staleness=_staleness(step, version_gaps, importance),
        parity_causes=_parity_causes(step),
        searched_bounds=_searched_bounds(bounds),
        kl=ReferenceKl(
            mean=step.kl / step.num_with_kl if step.num_with_kl else None,
            max=step.max_kl if step.num_with_kl else None,
            coef=kl_coef if step.num_with_kl else None,
        ),
        pretraining=PretrainingResult(
            loss=step.text_loss / step.num_text_tokens if step.num_text_tokens else None,
            tokens=int(step.num_text_tokens) if step.num_text_tokens else None,
        ),
        critic=critic or CriticResult(),
        experts=experts or ExpertResult(),
    )


def _step_sums(mini_batches: list[MiniBatchSums]) -> MiniBatchSums:
    """The sums and maxima of all mini-batches."""

    def merged(name: str) -> float:
        values: list[float] = [getattr(sums, name) for sums in mini_batches]
        return max(values, default=0.0) if name.startswith("max_") else sum(values)

    return MiniBatchSums(**{field.name: merged(field.name) for field in fields(MiniBatchSums)})


def _staleness(
    step: MiniBatchSums, version_gaps: np.ndarray, importance: ImportanceConfig
) -> Staleness:
    outside = step.num_outside / step.num_weighted if step.num_weighted else None
    none_outside = None if outside is None else 0.0
    return Staleness(
        token_share=float((version_gaps != 0).mean()) if len(version_gaps) else None,
        mean=float(version_gaps.mean()) if len(version_gaps) else None,
        max=int(version_gaps.max()) if len(version_gaps) else None,
        logprob_drift_mean=step.logprob_drift / step.num_stale if step.num_stale else None,
        logprob_drift_max=step.max_logprob_drift if step.num_stale else None,
        weight_truncated_share=outside if importance.bound == "truncate" else none_outside,
        weight_masked_share=outside if importance.bound == "mask" else none_outside,
    )


def _parity_causes(step: MiniBatchSums) -> ParityCauses:
    probed, fresh = step.num_probed, step.num_probed_fresh
    return ParityCauses(
        batch_shape_abs_mean=step.shape_difference / probed if probed else None,
        batch_shape_abs_max=step.max_shape_difference if probed else None,
        engine_abs_mean=step.engine_difference / fresh if fresh else None,
        engine_abs_max=step.max_engine_difference if fresh else None,
    )


def _searched_bounds(bounds: Sequence[BapoBounds]) -> SearchedBounds:
    def mean(values: Sequence[float]) -> float | None:
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else None

    shares = [found.share for found in bounds]
    return SearchedBounds(
        clip_low=mean([found.low for found in bounds]),
        clip_high=mean([found.high for found in bounds]),
        share_before=mean([found.share_before for found in bounds]),
        share=mean(shares),
        share_min=min((share for share in shares if not math.isnan(share)), default=None),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def gradient_sizes(
    logprobs: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> tuple[float, float]:
    """Sum of |loss weight x derivative in the log-prob| where the advantage is positive, and in
    all.

    Of the policy term alone, behind its gate: a clipped token has none, a truncated one what is
    left of it. The KL divergence and the entropy bonus pull at every token and have no part in it.

    Args:
        logprobs: [R] of the update.
        inputs: [R] of the same tokens; with a sequence ratio the old log-probs are shifted.
        objective: as the update has it, with the clip bounds that were searched for it.
    """
    without_reference = replace(inputs, logprobs_ref=None)
    terms = policy_terms(logprobs, torch.zeros_like(logprobs), without_reference, objective)
    sizes = (inputs.loss_weights * terms.d_logprobs).abs().to(torch.float64)
    positive = torch.where(inputs.advantages > 0, sizes, 0.0)
    together: list[float] = torch.stack((positive.sum(), sizes.sum())).tolist()
    return together[0], together[1]
