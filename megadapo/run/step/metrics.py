"""The metrics and warnings of one step, from what was sampled and trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megadapo.algorithm.advantages import overlong_penalties
from megadapo.algorithm.mini_batches import mini_batch_sizes
from megadapo.cluster.processes import MIB
from megadapo.config import RunConfig
from megadapo.observe.metrics.reflection import reflection_shares

if TYPE_CHECKING:
    from megadapo.rewards.verifier import VerifierCounts
    from megadapo.rollout.pool.publish import PublishReport
    from megadapo.rollout.sampling.statistics import SampledBatch
    from megadapo.trainer.types import UpdateResult


def step_metrics(
    step: int,
    sampled: SampledBatch,
    update: UpdateResult,
    *,
    config: RunConfig,
    published: PublishReport | None = None,
) -> dict[str, int | float | None]:
    """Return a step's metrics, except the ones that `RunLog.record` adds.

    `published`: report on the publication of the step's weights; None without engines.
    """
    return {
        **update_metrics(step, update),
        "time/reward_s": None if sampled.is_replay else sampled.counters.reward_seconds,
        "time/overdue_s": sampled.counters.overdue_seconds,
        **_responses(sampled, config),
        **reflection_shares(
            [response.text for group in sampled.groups for response in group.responses],
            config.observe.reflection_phrases,
        ),
        **_groups(sampled),
        **_tool_use(sampled, config),
        "weights/bytes": None if published is None else published.num_bytes,
        "weights/density": None if published is None else published.density,
        "weights/update_s": None if published is None else published.seconds,
        "weights/pause_s": None if published is None else published.pause_seconds,
        **_engine_load(sampled),
    }


def update_metrics(step: int, update: UpdateResult) -> dict[str, int | float | None]:
    """Return the metrics of a step's updates and of the trainer's ranks."""
    return {
        "step": step,
        "policy_version": step,
        **update.metrics,
        **_spread("train/rank_tokens_{}", update.rank_tokens),
        **_spread("memory/rank_{}_mib", [size / MIB for size in update.rank_bytes]),
        **_spread("time/rank_logprobs_{}_s", update.rank_seconds),
        "train/slowest_rank": int(np.argmax(update.rank_seconds)) if update.rank_seconds else None,
    }


def _groups(sampled: SampledBatch) -> dict[str, int | float | None]:
    """Return counts of groups, and of the tokens that engines generated for them."""
    counters = sampled.counters
    total = len(counters.stats)
    num_tokens = sum(group.num_generated for group in counters.stats)
    return {
        "groups/sampled": total,
        "groups/kept": len(sampled.groups),
        "groups/all_correct": counters.num_at("all_correct"),
        "groups/all_wrong": counters.num_at("all_wrong"),
        "groups/equal": counters.num_at("equal"),
        "groups/one_text_wrong": sum(
            group.is_one_text and group.level == "all_wrong" for group in counters.stats
        ),
        "groups/rejected_unequal": counters.num_rejected_unequal,
        "groups/all_correct_share": _share(counters.num_at("all_correct"), total),
        "groups/all_wrong_share": _share(counters.num_at("all_wrong"), total),
        "groups/equal_share": _share(counters.num_at("equal"), total),
        "groups/from_reserve": sampled.num_from_reserve,
        "groups/to_reserve": len(counters.to_reserve),
        "groups/dropped": len(counters.dropped) + counters.num_surplus,
        "groups/unscored": len(counters.unscored),
        "groups/stopped": counters.num_stopped,
        "groups/carried": counters.num_carried,
        "groups/overdue": counters.num_overdue,
        "groups/from_journal": counters.num_from_journal,
        "tokens/generated": None if sampled.is_replay else num_tokens,
        "tokens/stopped": None if sampled.is_replay else counters.num_tokens_stopped,
        "tokens/recomputed": counters.num_recomputed,
    }


def _responses(sampled: SampledBatch, config: RunConfig) -> dict[str, int | float | None]:
    """Return metrics of the step's responses; null if it completed none."""
    counters = sampled.counters
    lengths = np.array(counters.response_lengths, dtype=np.float64)
    penalties = overlong_penalties(
        lengths,
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    penalty = float(penalties.mean()) if len(lengths) else math.nan
    p50, p95, longest = np.quantile(lengths, [0.5, 0.95, 1.0]) if len(lengths) else [math.nan] * 3
    values = {
        "reward/mean": counters.reward_mean,
        "reward/excluded": counters.num_excluded,
        "reward/overlong_penalty_mean": penalty,
        "reward/shaped_mean": counters.reward_mean + penalty,
        "accuracy/mean": counters.accuracy,
        "response_length/mean": float(lengths.mean()) if len(lengths) else math.nan,
        "response_length/p50": float(p50),
        "response_length/p95": float(p95),
        "response_length/max": float(longest),
        "response_length/truncated_fraction": counters.truncated_fraction,
    }
    for name, value in counters.reward_parts.items():
        # counts of environments have their own area
        values[name if name.startswith("environment/") else f"reward/{name}"] = value
    return {name: _measured(value) for name, value in {**values, **counters.failures}.items()}


def _tool_use(sampled: SampledBatch, config: RunConfig) -> dict[str, float | None]:
    """Return metrics of tools, environments and branches; null without, and in a replay."""
    stats = [] if sampled.is_replay else sampled.counters.stats
    of_tools = stats if config.rollout.environments else []
    of_branches = stats if config.sampling.branching.is_on else []
    num_responses = sum(group.num_responses for group in of_tools)
    num_tokens = sum(length for group in of_tools for length in group.lengths)
    rises = [rise for group in of_branches for rise in group.entropy_rises if not math.isnan(rise)]
    return {
        "tools/calls_per_response": _share(sum(g.num_calls for g in of_tools), num_responses),
        "tools/token_share": _share(sum(g.num_output_tokens for g in of_tools), num_tokens),
        "tools/branches_per_group": _share(
            sum(g.num_branches for g in of_branches), len(of_branches)
        ),
        "tools/entropy_rise": _share(math.fsum(rises), len(rises)),
    }


def _engine_load(sampled: SampledBatch) -> dict[str, int | float | None]:
    """Return times of groups, and how busy the engines were."""
    counters = sampled.counters
    engines = [engine for engine in counters.engines if engine.seconds > 0]
    total = sum(engine.seconds for engine in engines)
    busy = sum(engine.busy_seconds for engine in engines)
    running = sum(engine.mean_running * engine.busy_seconds for engine in engines)
    times = [] if sampled.is_replay else [group.seconds for group in counters.stats]
    return {
        "time/group_p50_s": float(np.quantile(times, 0.5)) if times else None,
        "time/group_p95_s": float(np.quantile(times, 0.95)) if times else None,
        "time/group_max_s": max(times, default=None),
        "rollout/engine_busy_share": _share(busy, total),
        "rollout/slot_use": _share(running, total),
        "rollout/engines_lost": len(counters.engines) - len(engines) if counters.engines else None,
        "rollout/preemptions": sum(e.num_preemptions for e in engines) if engines else None,
        "rollout/kv_use_max": max((e.max_kv_use for e in engines), default=None),
        **_spread("rollout/tokens_per_s_{}", [e.num_tokens / e.seconds for e in engines]),
        **_spread("rollout/engine_tokens_{}", [e.num_tokens for e in engines]),
        **_spread("time/engine_{}_s", [e.busy_seconds for e in engines]),
        **_spread("memory/engine_{}_mib", [e.private_bytes / MIB for e in engines]),
    }


def _share(part: float, whole: float) -> float | None:
    """Return the quotient; null if there was nothing to count."""
    return part / whole if whole else None


def _measured(value: float) -> float | None:
    """Return null for NaN: nothing was measured."""
    return None if math.isnan(value) else value


def _spread(name: str, values: Sequence[float]) -> dict[str, int | float | None]:
    """Return the smallest and the largest of several processes' values; null without values."""
    return {
        name.format("min"): min(values, default=None),
        name.format("max"): max(values, default=None),
    }


def step_warnings(
    step: int, sampled: SampledBatch, update: UpdateResult, config: RunConfig
) -> Iterator[str]:
    """Yield a line each for missing groups, dropped groups, dropped tokens and skipped updates."""
    prompts_per_step, counters = config.sampling.prompts_per_step, sampled.counters
    num_kept = len(sampled.groups)
    if num_kept < prompts_per_step and sampled.is_replay:
        yield (
            f"step {step}: only {num_kept} of {prompts_per_step} groups of the batch "
            'are saved (observe.saved_groups = "all" saves whole batches): '
            f"{_smaller_batch(num_kept, config)}"
        )
    elif num_kept < prompts_per_step:
        yield (
            f"step {step}: only {num_kept} of {prompts_per_step} groups are mixed "
            f"among {len(counters.stats)} sampled ({counters.num_at('all_correct')} all correct, "
            f"{counters.num_at('all_wrong')} all incorrect, {counters.num_at('equal')} with equal "
            f"rewards): {_smaller_batch(num_kept, config)}"
        )
    if counters.dropped:
        yield (
            f"step {step}: {len(counters.dropped)} groups dropped: they are older than "
            "sampling.max_staleness allows"
        )
    if update.num_dropped_tokens:
        yield (
            f"step {step}: {update.num_dropped_tokens} response tokens left out of the loss: the "
            "engine gave no finite log-prob for them"
        )
    yield from skipped_updates(step, update)


def skipped_updates(step: int, update: UpdateResult) -> Iterator[str]:
    """Yield a line if updates were skipped."""
    if skipped := update.metrics["policy/skipped_updates"]:
        yield f"step {step}: {skipped} updates skipped: loss or gradient not finite"


def _smaller_batch(num_groups: int, config: RunConfig) -> str:
    """Return a phrase about the updates of a step with too few groups."""
    planned = config.groups_per_mini_batch
    sizes = mini_batch_sizes(num_groups, planned)
    found = " or ".join(str(size) for size in sorted(set(sizes)))
    return f"the batch is smaller, with {len(sizes)} updates of {found} groups instead of {planned}"


def verifier_summary(counts: VerifierCounts) -> str:
    """Return one line on the scored responses and on where the two comparisons differed."""
    symbolic = counts.symbolic
    lost = symbolic.num_timeouts + symbolic.num_crashes + symbolic.num_skipped
    return (
        f"verifier: {counts.num_scored} responses scored, {counts.num_unanswered} without an "
        f"answer; symbolic comparison of {symbolic.num_checked} different answers, "
        f"{counts.num_only_rule} correct by the rule alone, {counts.num_only_symbolic} correct "
        f"symbolically alone; {symbolic.num_refused} refused, {lost} lost to limits, "
        f"{counts.num_left_out} left out"
    )
