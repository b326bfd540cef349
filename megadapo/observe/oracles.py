"""Invariants that are measured on every step and stop the run when they break."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import NonNegativeFloat

from megadapo.errors import OracleError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.section import Section


class OracleConfig(Section, title="oracles"):
    """Bounds that every step is checked against; a run that breaks one stops."""

    ratio_first_max_error: NonNegativeFloat = 0.0
    """Largest |ratio - 1| on the first mini-batch of a step, while the policy is the old one. With
    one mini-batch a step, GPUs measure it in step 1 and in steps that save a checkpoint."""
    logprob_abs_mean: NonNegativeFloat | None = None
    """Mean |log-prob(trainer) - log-prob(engine)| in nats: over the freshly sampled tokens, whose
    sum is divided by 100 if they are fewer, and over stale tokens that the engines score again."""
    logprob_abs_max: NonNegativeFloat | None = None
    """Largest |log-prob(trainer) - log-prob(engine)| in nats over the same tokens."""


RATIO = "ratio_first_max_error"
FIRST_RATIO = f"policy/{RATIO}"
_DISAGREE = (
    "trainer and engine disagree about the same tokens: look at the weight transfer, the dtypes "
    "and the sampling temperature"
)
_PROBE_DISAGREES = (
    "trainer and engines disagree about stale tokens that both score with the same weights: look "
    "at the weight transfer"
)
BOUNDED = (
    (
        RATIO,
        FIRST_RATIO,
        "old and new log-probs of the same policy differ, so the clip acts on noise: the trainer "
        "does not compute the same thing twice",
    ),
    ("logprob_abs_mean", "parity/logprob_abs_mean", _DISAGREE),
    ("logprob_abs_max", "parity/logprob_abs_max", _DISAGREE),
    ("logprob_abs_mean", "parity/probe_abs_mean", _PROBE_DISAGREES),
    ("logprob_abs_max", "parity/probe_abs_max", _PROBE_DISAGREES),
)
"""(key of `[oracles]`, the metric that it bounds, what a broken bound means)."""
MAX_SKIPPED_STEPS = 3
"""Steps in a row with a skipped (non-finite) update after which the run stops."""
MIN_FRESH_TOKENS = 100
"""The sum over fewer fresh tokens is bounded as if they were so many. Else one ill-conditioned
token among three would break the bound of a mean."""
MAY_BE_NULL = (FIRST_RATIO, "parity/probe_abs_mean", "parity/probe_abs_max")
"""Metrics that some steps do not have."""


def check_oracles(
    records: Sequence[MetricRecord],
    config: OracleConfig,
    *,
    is_deterministic: bool,
    compares_logprobs: bool = True,
) -> list[str]:
    """Check the newest step of the run against its bounds.

    Args:
        is_deterministic: whether the trainer computes the same bits twice, so that the first ratio
            must be 1. Otherwise only the first step that breaks the bound is reported.
        compares_logprobs: whether updates have old log-probs; without them only skipped updates
            and the loss are checked.

    Returns:
        Messages about the step.

    Raises:
        OracleError: a bound is broken or was not measured. The message names the metric, its
            value, the bound and the likely causes.
    """
    newest, notes = records[-1], []
    for key, metric, meaning in BOUNDED if compares_logprobs else ():
        bound = getattr(config, key)
        if bound is None or is_within(newest, metric, bound):
            continue
        broken = (
            f"step {newest['step']}: {metric} = {newest[metric]} is not within "
            f"oracles.{key} = {bound}: {meaning}"
        )
        if is_deterministic or key != RATIO or not math.isfinite(newest[metric] or math.nan):
            raise OracleError(broken)
        if all(is_within(record, metric, bound) for record in records[:-1]):
            notes.append(
                f"{broken}. The run continues, because GPUs promise equal bits only with "
                "trainer.deterministic = true; later steps are reported in the metrics only"
            )
    _check_skipped(records)
    return notes


def is_within(record: MetricRecord, metric: str, bound: float) -> bool:
    """Return whether a step keeps a bound. NaN breaks it, and so does a missing value unless the
    step does not measure it."""
    value = record.get(metric)
    if value is not None:
        share, stale = 1.0, record.get("staleness/token_share")
        num_tokens = record.get("tokens/trained")
        if metric == "parity/logprob_abs_mean" and stale is not None and num_tokens is not None:
            share = min(1.0, (1.0 - stale) * num_tokens / MIN_FRESH_TOKENS)
        return value * share <= bound
    # a step without stale tokens has no probe, and one without fresh tokens has nothing else; a
    # probe that no engine answered is missing too, with a warning; GPUs measure the first ratio in
    # some steps only
    is_all_stale = record.get("staleness/token_share") == 1.0
    return metric in MAY_BE_NULL or (metric.startswith("parity/") and is_all_stale)


def _check_skipped(records: Sequence[MetricRecord]) -> None:
    recent = [record["policy/skipped_updates"] for record in records[-MAX_SKIPPED_STEPS:]]
    if len(recent) == MAX_SKIPPED_STEPS and all(recent):
        raise OracleError(
            f"step {records[-1]['step']}: updates were skipped in {MAX_SKIPPED_STEPS} steps in a "
            "row because the loss or its gradient was not finite; weights are those of the last "
            "finite update: lower trainer.optimizer.lr, or look for NaN log-probs in "
            "parity/logprob_abs_max"
        )
    loss = records[-1]["policy/loss"]
    if loss is not None and not math.isfinite(loss) and not records[-1]["policy/skipped_updates"]:
        raise OracleError(f"step {records[-1]['step']}: a non-finite loss {loss} was not skipped")
