"""Sums of a mini-batch's statistics, their reduction over all ranks, and the step's result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megadapo.algorithm.bapo import BapoBounds
from megadapo.algorithm.objective import MAX_LOG_RATIO
from megadapo.data.batch import PackedBatch
from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.observe.metrics.names import SUMMED
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.parallel import has_results
from megadapo.trainer.types import Metrics, RecordedTokens


def summed(*, critic: bool) -> list[str]:
    """Return the declared sums of the critic, or of the policy, and the counts below them."""
    metrics = [one for one in SUMMED.values() if one.name.startswith("critic/") == critic]
    return list(dict.fromkeys(name for one in metrics for name in (one.per, one.name)))


RARE = 0.2
"""Probability below which a token counts as rare."""
GRADIENT_SHARES = [one.name for one in SUMMED.values() if one.per.endswith("_gradient")]
POLICY_SUMS = summed(critic=False)


class Sums(dict[str, float]):
    """Sums and maxima of one mini-batch, of one rank or all, or of a step, by name.

    The names are those of metrics, and of the counts that these are divided by. The declaration of
    a metric says what becomes of its sum (`observe/metrics/panel.py:Metric`).
    """

    def __init__(self, names: Iterable[str] = POLICY_SUMS) -> None:
        super().__init__(dict.fromkeys(names, 0.0))

    def reduced(self, device: torch.device) -> Self:
        """Return the sums over the ranks with results; collective, the same on all ranks."""
        own, found = self if has_results() else type(self)(self), type(self)(self)
        for is_max, op in ((False, ReduceOp.SUM), (True, ReduceOp.MAX)):
            names = [name for name in self if _is_max(name) == is_max]
            if names:
                # MAX drops NaN but keeps infinity
                lost = math.inf if is_max else math.nan
                values = [lost if math.isnan(own[name]) else own[name] for name in names]
                tensor = torch.tensor(values, dtype=torch.float64, device=device)
                torch.distributed.all_reduce(tensor, op=op)
                found.update(zip(names, tensor.tolist(), strict=True))
        return found

    @classmethod
    def merged(cls, mini_batches: Sequence[Self]) -> Self:
        """Combine the sums of a step's mini-batches."""
        found = cls(*mini_batches[:1])
        for name in found:
            values = [sums[name] for sums in mini_batches]
            found[name] = max(values, default=0.0) if _is_max(name) else sum(values)
        found["updates"] = len(mini_batches)
        return found

    def value(self, name: str) -> float | None:
        """Return a metric; None if nothing was counted.

        The means over tokens and updates are NaN then, because every step has both.
        """
        metric = SUMMED[name]
        if not self[metric.per]:
            return math.nan if metric.per in ("tokens", "updates") else None
        return self[name] if metric.is_max else self[name] / self[metric.per]

    def metrics(self) -> Metrics:
        """Return all metrics that are declared as sums."""
        return {name: self.value(name) for name in self if name in SUMMED}

    def add(self, micro_batch: MicroBatch, output: PolicyHeadOutput, head: PolicyHead) -> None:
        """Measure one micro-batch: the head's output, with the bounds that were searched for it."""
        # the head drops tokens whose old log-probs are not finite. Dropped tokens here mean a
        # fault of the model, and its gradient cannot be trusted
        self["policy/loss"] += math.nan if output.num_dropped.item() else output.loss.item()
        self["tokens"] += output.num_tokens.item()
        self["policy/entropy"] += output.entropy_sum.item()
        self["policy/ratio_mean"] += output.ratio_sum.item()
        self["policy/clip_low_fraction"] += output.clip_low_count.item()
        self["policy/clip_high_fraction"] += output.clip_high_count.item()
        self["policy/clip_high_probability"] += output.clip_high_probability_sum.item()
        largest = output.clip_high_probability_max.item()
        self._add_most("policy/clip_high_probability_max", largest)
        self["policy/dual_clip_fraction"] += output.dual_clip_count.item()
        self["policy/token_probability_mean"] += output.probability_sum.item()
        self._add_most("policy/ratio_first_max_error", _ratio_error(micro_batch, output))
        self._add_old_policy(micro_batch)
        self["weighted_tokens"] += micro_batch.num_weighted
        if head.importance.bound == "truncate":
            self["staleness/weight_truncated_share"] += micro_batch.num_outside
        elif head.importance.bound == "mask":
            self["staleness/weight_masked_share"] += micro_batch.num_outside
        self["policy/approx_kl"] += _kl_from_old(micro_batch, output.logprobs)
        self._add_gradient(micro_batch, output)
        if head.objective.ratio == "sequence":
            self._add_clipped_sequences(micro_batch, output)

    def _add_gradient(self, micro_batch: MicroBatch, output: PolicyHeadOutput) -> None:
        """Add the sizes of the tokens' policy gradients in log-prob space and in logit space."""
        in_logprobs = output.d_policy.abs().double()
        in_logits = in_logprobs * output.distance
        is_positive = micro_batch.advantages > 0
        is_rare = output.logprobs < math.log(RARE)
        self["logprob_gradient"] += in_logprobs.sum().item()
        self["logit_gradient"] += in_logits.sum().item()
        self["policy/positive_share_in_logprobs"] += in_logprobs[is_positive].sum().item()
        self["policy/positive_share_in_logits"] += in_logits[is_positive].sum().item()
        self["policy/rare_share_in_logits"] += in_logits[is_rare].sum().item()

    def _add_old_policy(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.proximal is not None, "computed before the first update"
        difference = (micro_batch.proximal[micro_batch.rows] - micro_batch.logprobs_rollout).abs()
        fresh = difference[micro_batch.is_current]
        if len(fresh):
            self["fresh_tokens"] += len(fresh)
            self["parity/logprob_abs_mean"] += fresh.sum(dtype=torch.float64).item()
            self._add_most("parity/logprob_abs_max", fresh.max().item())
        if micro_batch.num_stale:
            drift = difference[micro_batch.is_stale]
            self["stale_tokens"] += micro_batch.num_stale
            self["staleness/logprob_drift_mean"] += drift.sum(dtype=torch.float64).item()
            self._add_most("staleness/logprob_drift_max", drift.max().item())
        kl = micro_batch.kl
        if kl is not None and len(kl):
            self["reference_tokens"] += len(kl)
            self["kl/mean"] += kl.sum().item()
            self._add_most("kl/max", kl.abs().max().item())

    def _add_clipped_sequences(self, micro_batch: MicroBatch, output: PolicyHeadOutput) -> None:
        """Add the sequences that the clip left out of the update.

        A token counts as its part of a sequence: context-parallel ranks have parts of it.
        """
        rows, weights = micro_batch.rows, micro_batch.importance_weights
        num_tokens = np.bincount(micro_batch.sequences_all_ranks)[micro_batch.sequences]
        parts = torch.from_numpy(1.0 / num_tokens).to(rows.device)
        is_clipped = (output.d_policy == 0) & (micro_batch.advantages != 0)
        if weights is not None:
            # a masked token has no gradient for another reason
            is_clipped &= weights != 0
        self["sequences"] += parts.sum().item()
        self["policy/clipped_sequences"] += parts[is_clipped[rows]].sum().item()

    def _add_most(self, name: str, value: float) -> None:
        self[name] = max(self[name], value)


def _is_max(name: str) -> bool:
    return name in SUMMED and SUMMED[name].is_max


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


def summarize(
    mini_batches: list[Sums],
    *,
    num_mini_batches: int,
    num_left_out: int | None,
    grad_norms: list[float],
    lr: float,
    version_gaps: np.ndarray,
    bounds: Sequence[BapoBounds],
    chosen_shares: Sequence[float],
    kl_coef: float,
    old_kl_coef: float,
) -> Metrics:
    """Return the policy's metrics of a step from its updates' reduced sums, in order.

    Args:
        num_mini_batches: number of updates of a pass.
        num_left_out: updates left out for `algorithm.max_kl`; the first of them is measured.
        chosen_shares: shares of tokens chosen by covariance, by update.
        version_gaps: publications between sampling and training, of each token of the step.
        kl_coef: of the reference, in the loss or the reward; old_kl_coef: of the old policy.
    """
    step = Sums.merged(mini_batches)
    num_applied = len(mini_batches) - bool(num_left_out)
    first_pass = mini_batches[: min(num_applied, num_mini_batches)]
    known = len(version_gaps) > 0
    return {
        **step.metrics(),
        "tokens/trained": int(Sums.merged(first_pass)["tokens"]),
        "policy/ratio_first_max_error": mini_batches[0]["policy/ratio_first_max_error"]
        if mini_batches
        else math.nan,
        "policy/approx_kl": _measured(step, "policy/approx_kl"),
        **{name: _measured(step, name) for name in GRADIENT_SHARES},
        "policy/chosen_fraction": mean_of(sum(chosen_shares), len(chosen_shares)),
        "policy/left_out_updates": num_left_out,
        "policy/grad_norm": ratio(sum(grad_norms), len(grad_norms)),
        "policy/lr": lr,
        "policy/skipped_updates": num_applied - len(grad_norms),
        "pretraining/tokens": int(step["pretraining/tokens"]) or None,
        "kl/coef": kl_coef if step["reference_tokens"] else None,
        "kl/old_coef": old_kl_coef or None,
        "kl/from_old": _measured(mini_batches[-1], "policy/approx_kl")
        if old_kl_coef and len(mini_batches) > 1
        else None,
        "staleness/token_share": float((version_gaps != 0).mean()) if known else None,
        "staleness/mean": float(version_gaps.mean()) if known else None,
        "staleness/max": int(version_gaps.max()) if known else None,
        **_searched_bounds(bounds),
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


def _measured(step: Sums, name: str) -> float | None:
    """Return a metric, and null too if it is not a number, as where a gradient is not finite."""
    value = step.value(name)
    return None if value is None or math.isnan(value) else value


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; NaN if nothing was counted."""
    return numerator / denominator if denominator else math.nan


def rank_tokens(split: Sequence[MiniBatch]) -> dict[str, tuple[float, ...]]:
    """Return the tokens of this rank's sequences; with context parallelism, of its part."""
    return {"train/rank_tokens_{}": (sum(mini_batch.num_tokens for mini_batch in split),)}


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
