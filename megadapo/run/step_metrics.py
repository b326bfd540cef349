"""One step's results under the names of the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megadapo.algorithm.mini_batches import mini_batch_sizes
from megadapo.algorithm.shaping import overlong_penalties
from megadapo.config import RunConfig
from megadapo.observe.metrics import EvaluationRecord

if TYPE_CHECKING:
    from megadapo.rewards.verifier import VerifierCounts
    from megadapo.rollout.sampled_batch import SampledBatch
    from megadapo.trainer.result import UpdateResult


def step_metrics(
    step: int,
    sampled: SampledBatch,
    update: UpdateResult,
    evaluation: EvaluationRecord | None,
    *,
    policy_version: int,
    config: RunConfig,
) -> dict[str, int | float | None]:
    """Everything a step measured but the times of its phases, which the run adds.

    Args:
        evaluation: the held-out evaluation of the step's weights, where there was one.
        policy_version: of those weights in the engines.
    """
    penalty = overlong_penalties(
        sampled.response_lengths,
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
    ).mean()
    # tokens of an earlier policy say nothing about the parity of this one
    has_fresh = sampled.num_from_reserve < sampled.num_kept
    return {
        "step": step,
        "policy_version": policy_version,
        "time/reward_s": sampled.reward_seconds,
        "reward/mean": sampled.reward_mean,
        "reward/overlong_penalty_mean": penalty,
        "reward/shaped_mean": sampled.reward_mean + penalty,
        "accuracy/mean": sampled.accuracy,
        "response_length/mean": sampled.response_length_mean,
        "response_length/p95": sampled.response_length_p95,
        "response_length/truncated_fraction": sampled.truncated_fraction,
        "groups/sampled": sampled.num_sampled,
        "groups/kept": sampled.num_kept,
        "groups/all_correct": sampled.num_all_correct,
        "groups/all_wrong": sampled.num_all_wrong,
        "groups/from_reserve": sampled.num_from_reserve,
        "groups/to_reserve": sampled.num_to_reserve,
        "tokens/generated": sampled.num_tokens,
        "tokens/trained": update.tokens_trained,
        "policy/loss": update.loss,
        "policy/entropy": update.entropy,
        "policy/ratio_mean": update.ratio_mean,
        "policy/ratio_first_max_error": update.ratio_first_max_error,
        "policy/clip_low_fraction": update.clip_low_fraction,
        "policy/clip_high_fraction": update.clip_high_fraction,
        "policy/token_probability_mean": update.token_probability_mean,
        "policy/grad_norm": update.grad_norm,
        "policy/lr": update.lr,
        "policy/skipped_updates": update.skipped_updates,
        "parity/logprob_abs_mean": update.logprob_abs_mean if has_fresh else None,
        "parity/logprob_abs_max": update.logprob_abs_max if has_fresh else None,
        "eval/accuracy": None if evaluation is None else evaluation.accuracy,
        **_spread("rollout/engine_tokens_{}", [share.num_tokens for share in sampled.engines]),
        **_spread("time/engine_{}_s", [share.seconds for share in sampled.engines]),
        **_spread("train/rank_tokens_{}", [share.num_tokens for share in update.shares]),
        **_spread("time/rank_logprobs_{}_s", [share.logprobs_seconds for share in update.shares]),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, int | float | None]:
    """The smallest and the largest of several processes' values; null where there are none."""
    return {
        name.format("min"): min(values, default=None),
        name.format("max"): max(values, default=None),
    }


def step_notes(
    step: int, sampled: SampledBatch, update: UpdateResult, config: RunConfig
) -> Iterator[str]:
    """What was left out of a step, a line for each reason; a healthy step has none."""
    prompts_per_step = config.sampling.prompts_per_step
    if sampled.num_kept < prompts_per_step and sampled.num_tokens is None:
        yield (
            f"step {step}: only {sampled.num_kept} of {prompts_per_step} groups are saved as "
            'trained on (observe.saved_groups = "all" saves whole batches): '
            f"{_smaller_batch(sampled.num_kept, config)}"
        )
    elif sampled.num_kept < prompts_per_step:
        yield (
            f"step {step}: only {sampled.num_kept} of {prompts_per_step} groups have a signal "
            f"among {sampled.num_sampled} asked for ({sampled.num_all_correct} all right, "
            f"{sampled.num_all_wrong} all wrong): {_smaller_batch(sampled.num_kept, config)}"
        )
    if sampled.num_dropped:
        yield f"step {step}: {sampled.num_dropped} surplus groups dropped, the reserve is full"
    if update.num_dropped_tokens:
        yield (
            f"step {step}: {update.num_dropped_tokens} response tokens left out of the loss, the "
            "engine gave no finite log-prob for them"
        )
    if update.skipped_updates:
        yield f"step {step}: {update.skipped_updates} updates skipped, loss or gradient not finite"


def _smaller_batch(num_groups: int, config: RunConfig) -> str:
    """How the updates of a step with too few groups differ from the planned ones."""
    planned = config.algorithm.responses_per_mini_batch // config.sampling.responses_per_prompt
    sizes = mini_batch_sizes(num_groups, planned)
    found = " or ".join(str(size) for size in sorted(set(sizes)))
    return (
        f"a smaller batch was trained on, in {len(sizes)} updates of {found} groups where "
        f"{planned} are planned"
    )


def verifier_note(counts: VerifierCounts) -> str:
    """One line on what was scored, and where the two comparisons differed."""
    symbolic = counts.symbolic
    lost = symbolic.num_timeouts + symbolic.num_crashes + symbolic.num_skipped
    return (
        f"verifier: {counts.num_scored} responses scored, {counts.num_unanswered} without an "
        f"answer; symbolic comparison of {symbolic.num_checked} different answers, "
        f"{counts.num_only_rule} right by the rule alone, {counts.num_only_symbolic} right "
        f"symbolically alone; {symbolic.num_refused} refused, {lost} lost to limits"
    )
