"""Sums of a mini-batch's statistics, their reduction over all ranks, and the step's result."""

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
from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.kernels.policy_head.terms import policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.model.head import HeadTask, sequence_old
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
    """Part of `gradient` from tokens with a positive advantage."""
    gradient: float = 0.0
    """Size of the policy term's gradient over the log-probs."""
    pretraining_loss: float = 0.0
    """Minus the log-probs of the pretraining tokens."""
    num_pretraining_tokens: float = 0.0
    num_compared: float = 0.0
    """Number of fresh tokens, whose two log-probs must agree."""
    logprob_difference: float = 0.0
    num_stale: float = 0.0
    """Number of tokens sampled from other weights."""
    logprob_drift: float = 0.0
    num_weighted: float = 0.0
    """Number of tokens with an importance weight."""
    num_outside: float = 0.0
    """Number of weighted tokens whose ratio is out of bounds."""
    num_with_kl: float = 0.0
    """Number of tokens that the reference policy scored."""
    kl: float = 0.0
    num_probed: float = 0.0
    """Number of tokens scored at a second micro-batch shape."""
    num_probed_fresh: float = 0.0
    shape_difference: float = 0.0
    engine_difference: float = 0.0
    max_ratio_error: float = 0.0
    max_logprob_difference: float = 0.0
    max_logprob_drift: float = 0.0
    max_shape_difference: float = 0.0
    max_engine_difference: float = 0.0
    max_kl: float = 0.0

    def add(self, task: HeadTask, output: PolicyHeadOutput, objective: PolicyObjective) -> None:
        """Add the head's output for one micro-batch; `objective` has the searched bounds."""
        micro_batch, old = task.micro_batch, task.old
        assert old is not None, "a task with a loss has old log-probs"
        # the head drops tokens whose old log-probs are not finite. Dropped tokens here mean a
        # fault of the model, and its gradient cannot be trusted
        self.loss += math.nan if output.num_dropped.item() else output.loss.item()
        self.num_tokens += output.num_tokens.item()
        self.entropy += output.entropy_sum.item()
        self.ratio += output.ratio_sum.item()
        self.clipped_low += output.clip_low_count.item()
        self.clipped_high += output.clip_high_count.item()
        self.dual_clipped += output.dual_clip_count.item()
        self.token_probability += output.probability_sum.item()
        self.logprob += output.logprobs[micro_batch.rows].sum(dtype=torch.float64).item()
        self.max_ratio_error = max(self.max_ratio_error, _ratio_error(micro_batch, old, output))
        self._add_old_policy(micro_batch, old)
        positive, size = gradient_sizes(
            output.logprobs[micro_batch.rows],
            _policy_inputs(micro_batch, old, output.logprobs, objective),
            objective,
        )
        self.positive_gradient += positive
        self.gradient += size

    def _add_old_policy(self, micro_batch: MicroBatch, old: OldPolicy) -> None:
        difference = (old.proximal[micro_batch.rows] - micro_batch.logprobs_rollout).abs()
        fresh = difference[micro_batch.is_current]
        if len(fresh):
            self.num_compared += len(fresh)
            self.logprob_difference += fresh.sum(dtype=torch.float64).item()
            self.max_logprob_difference = max(self.max_logprob_difference, fresh.max().item())
        if micro_batch.num_stale:
            drift = difference[micro_batch.is_stale]
            self.num_stale += micro_batch.num_stale
            self.logprob_drift += drift.sum(dtype=torch.float64).item()
            self.max_logprob_drift = max(self.max_logprob_drift, drift.max().item())
        if old.kl is not None and len(old.kl):
            self.num_with_kl += len(old.kl)
            self.kl += old.kl.sum().item()
            self.max_kl = max(self.max_kl, old.kl.abs().max().item())
        self.num_weighted += old.num_weighted
        self.num_outside += old.num_outside

    def reduced(self, *, contributes: bool, device: torch.device) -> MiniBatchSums:
        """Return the sums over the ranks that contribute; collective, the same on all ranks.

        Tensor-parallel ranks hold the same numbers, so only one of them may contribute.
        """
        own = self if contributes else MiniBatchSums()
        names = [field.name for field in fields(self)]
        maxima = [name for name in names if name.startswith("max_")]
        sums = [name for name in names if name not in maxima]
        values = asdict(own)
        total = _all_reduce([values[n] for n in sums], torch.distributed.ReduceOp.SUM, device)
        # MAX drops NaN but keeps infinity
        bounded = [math.inf if math.isnan(values[n]) else values[n] for n in maxima]
        largest = _all_reduce(bounded, torch.distributed.ReduceOp.MAX, device)
        return MiniBatchSums(**dict(zip(sums + maxima, total + largest, strict=True)))


def _ratio_error(micro_batch: MicroBatch, old: OldPolicy, output: PolicyHeadOutput) -> float:
    """Return the largest |ratio - 1| over tokens whose old log-prob the trainer computed."""
    if old.logprobs is old.proximal:
        return output.ratio_max_error.item()
    recomputed = micro_batch.rows[~micro_batch.is_stale]
    if not len(recomputed):
        return 0.0
    change = output.logprobs[recomputed] - old.logprobs[recomputed]
    return torch.expm1(change).abs().max().item()


def _policy_inputs(
    micro_batch: MicroBatch, old: OldPolicy, logprobs: Tensor, objective: PolicyObjective
) -> PolicyInputs:
    by_token = objective.ratio != "sequence"
    return PolicyInputs(
        logprobs_old=old.logprobs if by_token else sequence_old(micro_batch, old, logprobs),
        advantages=micro_batch.advantages if old.advantages is None else old.advantages,
        loss_weights=micro_batch.loss_weights,
        logprobs_ref=None,
        importance_weights=old.importance_weights,
    ).map(lambda values: values[micro_batch.rows])


def gradient_sizes(
    logprobs: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> tuple[float, float]:
    """Return sums of |loss weight x derivative in the log-prob|: positive advantages, and all.

    Only the policy term counts, after its gate: 0 for a clipped token, the rest of a truncated
    one. The KL divergence and the entropy bonus do not count.

    Args:
        logprobs: [R] of the update.
        inputs: [R] of the same tokens; with a sequence ratio, shifted old log-probs.
        objective: of the update, with the clip bounds that were searched for it.
    """
    without_reference = replace(inputs, logprobs_ref=None)
    terms = policy_terms(logprobs, torch.zeros_like(logprobs), without_reference, objective)
    sizes = (inputs.loss_weights * terms.d_logprobs).abs().to(torch.float64)
    positive = torch.where(inputs.advantages > 0, sizes, 0.0)
    together: list[float] = torch.stack((positive.sum(), sizes.sum())).tolist()
    return together[0], together[1]


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
    num_dropped_tokens: int,
    lr: float,
    version_gaps: np.ndarray,
    importance: ImportanceConfig,
    bounds: Sequence[BapoBounds] = (),
    kl_coef: float = 0.0,
    critic: CriticResult | None = None,
    experts: ExpertResult | None = None,
) -> UpdateResult:
    """Return the step's result from its mini-batches' reduced sums, in order.

    Args:
        grad_norms: of the applied updates.
        version_gaps: publications between sampling and training, of each token of the step.
        importance: rule that weighted stale tokens.
        bounds: searched clip bounds of each update.
        kl_coef: coefficient of the KL divergence, in the loss or the reward.
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
        skipped_updates=len(mini_batches) - len(grad_norms),
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
            loss=step.pretraining_loss / step.num_pretraining_tokens
            if step.num_pretraining_tokens
            else None,
            tokens=int(step.num_pretraining_tokens) if step.num_pretraining_tokens else None,
        ),
        critic=critic or CriticResult(),
        experts=experts or ExpertResult(),
    )


def _step_sums(mini_batches: list[MiniBatchSums]) -> MiniBatchSums:
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
