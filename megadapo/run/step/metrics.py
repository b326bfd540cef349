"""The metrics and warnings of one step, from what was sampled and trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megadapo.algorithm.mini_batches import mini_batch_sizes
from megadapo.config import RunConfig
from megadapo.observe.metrics.reflection import reflection_shares
from megadapo.rollout.sampling.statistics import SampledBatch, spread
from megadapo.trainer.types import RANK_SECONDS

if TYPE_CHECKING:
    from megadapo.rewards.verifier import VerifierCounts
    from megadapo.rollout.pool.publish import PublishReport
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
        **sampled.metrics(config.algorithm, config.rollout, config.sampling),
        **reflection_shares(
            [response.text for group in sampled.groups for response in group.responses],
            config.observe.reflection_phrases,
        ),
        "weights/bytes": None if published is None else published.num_bytes,
        "weights/density": None if published is None else published.density,
        "weights/update_s": None if published is None else published.seconds,
        "weights/pause_s": None if published is None else published.pause_seconds,
    }


def update_metrics(step: int, update: UpdateResult) -> dict[str, int | float | None]:
    """Return the metrics of a step's updates and of the trainer's ranks."""
    found = update.of_ranks
    seconds = found.get(RANK_SECONDS)
    return {
        "step": step,
        "policy_version": step,
        **update.metrics,
        **{name: one for key in found for name, one in spread(key, found[key]).items()},
        "train/slowest_rank": int(np.argmax(seconds)) if seconds else None,
    }


def step_warnings(
    step: int, sampled: SampledBatch, update: UpdateResult, config: RunConfig
) -> Iterator[str]:
    """Yield a line each for missing groups, dropped groups, dropped tokens and skipped updates."""
    prompts_per_step, num_kept = config.sampling.prompts_per_step, len(sampled.groups)
    if num_kept < prompts_per_step and sampled.is_replay:
        yield (
            f"step {step}: only {num_kept} of {prompts_per_step} groups of the batch "
            'are saved (observe.saved_groups = "all" saves whole batches): '
            f"{_smaller_batch(num_kept, config)}"
        )
    elif num_kept < prompts_per_step:
        yield (
            f"step {step}: only {num_kept} of {prompts_per_step} groups are mixed "
            f"among {len(sampled.stats)} sampled ({sampled.num_at('all_correct')} all correct, "
            f"{sampled.num_at('all_wrong')} all incorrect, {sampled.num_at('equal')} with equal "
            f"rewards): {_smaller_batch(num_kept, config)}"
        )
    if sampled.dropped:
        yield (
            f"step {step}: {len(sampled.dropped)} groups dropped: they are older than "
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
    return (
        f"verifier: {counts.num_scored} responses scored, {counts.num_unanswered} without an "
        f"answer; symbolic comparison of {counts.num_checked} different answers, "
        f"{counts.num_only_rule} correct by the rule alone, {counts.num_only_symbolic} correct "
        f"symbolically alone; {counts.num_refused} refused, {counts.num_lost} lost to limits, "
        f"{counts.num_left_out} left out"
    )
