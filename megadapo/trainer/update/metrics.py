"""Sums of a mini-batch's statistics, their reduction over all ranks, and the step's result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megadapo.algorithm.bapo import BapoBounds
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.kernels.policy_head.terms import policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.model.head import sequence_ratios
from megadapo.trainer.model.parallel import has_results
from megadapo.trainer.types import Metrics, RecordedTokens


@dataclass(kw_only=True)
class Sums:
    """A base of sums over the tokens of one mini-batch; fields named max_... are maxima."""

    def reduced(self, device: torch.device) -> Self:
        """Return the sums over the ranks with results; collective, the same on all ranks."""
        own = asdict(self if has_results() else type(self)())
        sums = {name: value for name, value in own.items() if not name.startswith("max_")}
        # MAX drops NaN but keeps infinity
        maxima = {n: math.inf if math.isnan(own[n]) else own[n] for n in own.keys() - sums.keys()}
        found: dict[str, float] = {}
        for values, op in ((sums, ReduceOp.SUM), (dict(sorted(maxima.items())), ReduceOp.MAX)):
            if values:
                tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
                torch.distributed.all_reduce(tensor, op=op)
                found |= dict(zip(values, tensor.tolist(), strict=True))
        return type(self)(**found)

    @classmethod
    def merged(cls, mini_batches: Sequence[Self]) -> Self:
        """Combine the sums of a step's mini-batches."""

        def of(name: str) -> float:
            values: list[float] = [getattr(sums, name) for sums in mini_batches]
            return max(values, default=0.0) if name.startswith("max_") else sum(values)

        return cls(**{field.name: of(field.name) for field in fields(cls)})


@dataclass(kw_only=True)
class MiniBatchSums(Sums):
    """Sums and maxima over the trained tokens of one mini-batch."""

    loss: float = 0.0
    num_tokens: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    approx_kl: float = 0.0
    """KL divergence of the policy before the step's first update to this one."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    clipped_high_probability: float = 0.0
    dual_clipped: float = 0.0
    token_probability: float = 0.0
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
    max_ratio_error: float = 0.0
    max_logprob_difference: float = 0.0
    max_logprob_drift: float = 0.0
    max_kl: float = 0.0

    @property
    def mean_kl(self) -> float:
        """Mean divergence of the old policy to this one, in nats per token; NaN without a token."""
        return ratio(self.approx_kl, self.num_tokens)

    def add(
        self, micro_batch: MicroBatch, output: PolicyHeadOutput, objective: PolicyObjective
    ) -> None:
        """Add the head's output for one micro-batch; `objective` has the searched bounds."""
        # the head drops tokens whose old log-probs are not finite. Dropped tokens here mean a
        # fault of the model, and its gradient cannot be trusted
        self.loss += math.nan if output.num_dropped.item() else output.loss.item()
        self.num_tokens += output.num_tokens.item()
        self.entropy += output.entropy_sum.item()
        self.ratio += output.ratio_sum.item()
        self.clipped_low += output.clip_low_count.item()
        self.clipped_high += output.clip_high_count.item()
        self.clipped_high_probability += output.clip_high_probability_sum.item()
        self.dual_clipped += output.dual_clip_count.item()
        self.token_probability += output.probability_sum.item()
        self.max_ratio_error = max(self.max_ratio_error, _ratio_error(micro_batch, output))
        self._add_old_policy(micro_batch)
        self.approx_kl += _kl_from_old(micro_batch, output.logprobs)
        positive, size = gradient_sizes(
            output.logprobs[micro_batch.rows],
            policy_inputs(micro_batch, output.logprobs, objective),
            objective,
        )
        self.positive_gradient += positive
        self.gradient += size

    def _add_old_policy(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.proximal is not None, "computed before the first update"
        difference = (micro_batch.proximal[micro_batch.rows] - micro_batch.logprobs_rollout).abs()
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
        kl = micro_batch.kl
        if kl is not None and len(kl):
            self.num_with_kl += len(kl)
            self.kl += kl.sum().item()
            self.max_kl = max(self.max_kl, kl.abs().max().item())
        self.num_weighted += micro_batch.num_weighted
        self.num_outside += micro_batch.num_outside


def _ratio_error(micro_batch: MicroBatch, output: PolicyHeadOutput) -> float:
    """Return the largest |ratio - 1| over tokens whose old log-prob the trainer computed."""
    old = micro_batch.logprobs_old
    assert old is not None, "computed before the first update"
    if old is micro_batch.proximal:
        return output.ratio_max_error.item()
    recomputed = micro_batch.rows[~micro_batch.is_stale]
    if not len(recomputed):
        return 0.0
    change = output.logprobs[recomputed] - old[recomputed]
    return torch.expm1(change).abs().max().item()


def _kl_from_old(micro_batch: MicroBatch, logprobs: Tensor) -> float:
    """Return the sum of r - 1 - log r over trained tokens, with the ratio clamped as in the loss.

    Its mean over samples of the old policy is KL(old policy to policy), and no term is negative.
    Schulman, "Approximating KL Divergence" (2020), k3.
    """
    # the loss may have the engine's log-probs of stale tokens, under weights of earlier steps
    old = micro_batch.proximal
    assert old is not None, "computed before the first update"
    trained = micro_batch.rows[(micro_batch.loss_weights != 0)[micro_batch.rows]]
    log_ratios = (logprobs[trained] - old[trained]).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return float((log_ratios.expm1() - log_ratios).sum().item())


def policy_inputs(
    micro_batch: MicroBatch, logprobs: Tensor, objective: PolicyObjective
) -> PolicyInputs:
    """Return the inputs [R] of the policy term; a sequence ratio's log replaces old log-probs."""
    old = micro_batch.logprobs_old
    assert old is not None, "computed before the first update"
    return PolicyInputs(
        logprobs_old=sequence_ratios(micro_batch, logprobs)
        if objective.ratio == "sequence"
        else old,
        advantages=micro_batch.advantages,
        loss_weights=micro_batch.loss_weights,
        logprobs_ref=None,
        importance_weights=micro_batch.importance_weights,
    ).map(lambda values: values[micro_batch.rows])


def gradient_sizes(
    logprobs: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> tuple[float, float]:
    """Return sums of |loss weight x derivative in the log-prob|: positive advantages, and all.

    Only the policy term counts, after its gate: 0 for a clipped token, the rest of a truncated
    one. The KL divergence and the entropy bonus do not count.

    Args:
        inputs: [R] of the same tokens; with a sequence ratio, its log in place of old log-probs.
        objective: of the update, with the clip bounds that were searched for it.
    """
    without_reference = replace(inputs, logprobs_ref=None)
    terms = policy_terms(logprobs, torch.zeros_like(logprobs), without_reference, objective)
    sizes = (inputs.loss_weights * terms.d_logprobs).abs().to(torch.float64)
    positive = torch.where(inputs.advantages > 0, sizes, 0.0)
    together: list[float] = torch.stack((positive.sum(), sizes.sum())).tolist()
    return together[0], together[1]


def summarize(
    mini_batches: list[MiniBatchSums],
    *,
    num_mini_batches: int,
    num_left_out: int | None,
    grad_norms: list[float],
    lr: float,
    version_gaps: np.ndarray,
    importance: ImportanceConfig,
    bounds: Sequence[BapoBounds],
    kl_coef: float,
) -> Metrics:
    """Return the policy's metrics of a step from its updates' reduced sums, in order.

    Args:
        num_mini_batches: number of updates of a pass.
        num_left_out: updates left out for `algorithm.max_kl`; the first of them is measured.
        grad_norms: of the applied updates.
        version_gaps: publications between sampling and training, of each token of the step.
        kl_coef: coefficient of the KL divergence, in the loss or the reward.
    """
    step = MiniBatchSums.merged(mini_batches)
    tokens = step.num_tokens
    num_applied = len(mini_batches) - bool(num_left_out)
    first_pass = mini_batches[: min(num_applied, num_mini_batches)]
    return {
        "tokens/trained": int(MiniBatchSums.merged(first_pass).num_tokens),
        "policy/loss": ratio(step.loss, len(mini_batches)),
        "policy/entropy": ratio(step.entropy, tokens),
        "policy/ratio_mean": ratio(step.ratio, tokens),
        "policy/ratio_first_max_error": mini_batches[0].max_ratio_error
        if mini_batches
        else math.nan,
        "policy/approx_kl": _measured(step.mean_kl),
        "policy/left_out_updates": num_left_out,
        "policy/clip_low_fraction": ratio(step.clipped_low, tokens),
        "policy/clip_high_fraction": ratio(step.clipped_high, tokens),
        "policy/clip_high_probability": mean_of(step.clipped_high_probability, step.clipped_high),
        "policy/dual_clip_fraction": ratio(step.dual_clipped, tokens),
        "policy/token_probability_mean": ratio(step.token_probability, tokens),
        "policy/positive_gradient_share": _measured(ratio(step.positive_gradient, step.gradient)),
        "policy/grad_norm": ratio(sum(grad_norms), len(grad_norms)),
        "policy/lr": lr,
        "policy/skipped_updates": num_applied - len(grad_norms),
        "pretraining/loss": mean_of(step.pretraining_loss, step.num_pretraining_tokens),
        "pretraining/tokens": int(step.num_pretraining_tokens) or None,
        **_distances(step, kl_coef),
        **_staleness(step, version_gaps, importance),
        **_searched_bounds(bounds),
    }


def _distances(step: MiniBatchSums, kl_coef: float) -> Metrics:
    """Return the distances from the reference policy and from the engines."""
    return {
        "kl/mean": mean_of(step.kl, step.num_with_kl),
        "kl/max": step.max_kl if step.num_with_kl else None,
        "kl/coef": kl_coef if step.num_with_kl else None,
        "parity/logprob_abs_mean": mean_of(step.logprob_difference, step.num_compared),
        "parity/logprob_abs_max": step.max_logprob_difference if step.num_compared else None,
    }


def _staleness(
    step: MiniBatchSums, version_gaps: np.ndarray, importance: ImportanceConfig
) -> Metrics:
    outside = mean_of(step.num_outside, step.num_weighted)
    none_outside = None if outside is None else 0.0
    known = len(version_gaps) > 0
    return {
        "staleness/token_share": float((version_gaps != 0).mean()) if known else None,
        "staleness/mean": float(version_gaps.mean()) if known else None,
        "staleness/max": int(version_gaps.max()) if known else None,
        "staleness/logprob_drift_mean": mean_of(step.logprob_drift, step.num_stale),
        "staleness/logprob_drift_max": step.max_logprob_drift if step.num_stale else None,
        "staleness/weight_truncated_share": outside
        if importance.bound == "truncate"
        else none_outside,
        "staleness/weight_masked_share": outside if importance.bound == "mask" else none_outside,
    }


def _searched_bounds(bounds: Sequence[BapoBounds]) -> Metrics:
    def mean(values: Sequence[float]) -> float | None:
        known = [value for value in values if not math.isnan(value)]
        return mean_of(sum(known), len(known))

    shares = [found.share for found in bounds]
    return {
        "bapo/clip_low": mean([found.low for found in bounds]),
        "bapo/clip_high": mean([found.high for found in bounds]),
        "bapo/share_before": mean([found.share_before for found in bounds]),
        "bapo/share": mean(shares),
        "bapo/share_min": min((share for share in shares if not math.isnan(share)), default=None),
    }


def mean_of(total: float, count: float) -> float | None:
    """Return total / count; None if nothing was counted."""
    return total / count if count else None


def _measured(value: float) -> float | None:
    return None if math.isnan(value) else value


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; NaN if nothing was counted."""
    return numerator / denominator if denominator else math.nan


def recorded_tokens(batch: PackedBatch, split: Sequence[MiniBatch]) -> RecordedTokens:
    """Return the numbers of the batch's recorded sequences; NaN where this rank has none.

    `split`: this rank's part of each mini-batch, after the updates, some of which may be left out.
    """
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    places = np.concatenate([np.arange(starts[i], batch.cu_seqlens[i + 1]) for i in batch.recorded])
    nothing = np.full(len(places), np.nan, dtype=np.float32)
    found = RecordedTokens(**{field.name: nothing.copy() for field in fields(RecordedTokens)})
    for micro_batch in (one for mini_batch in split for one in mini_batch):
        wanted = np.isin(micro_batch.batch_index, places)
        old, proximal = micro_batch.logprobs_old, micro_batch.proximal
        update = micro_batch.logprobs_update
        if old is None or proximal is None or update is None or not wanted.any():
            continue
        slots = np.searchsorted(places, micro_batch.batch_index[wanted])
        kept = [(found.old, old), (found.proximal, proximal), (found.update, update)]
        if micro_batch.has_computed_advantages:
            kept.append((found.advantages, micro_batch.advantages))
        for target, values in kept:
            target[slots] = values[micro_batch.rows].cpu().numpy()[wanted]
    return found
