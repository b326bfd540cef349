"""Warnings about a run that looks better than it is, from what it has recorded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, harmonic_mean, variance

from megadapo.data.group import FAILED
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord

RECENT_STEPS = 10
"""Number of the last steps that warnings about groups and failures are about."""
MOST_GROUPS = 0.5
"""Share of their sampled groups above which a warning counts them."""
OFTEN_FAILED = 0.02
"""Share of their responses on which a function may fail without a warning."""
BEST_FACTOR = 2.0
"""Factor on the standard errors of a fall from the best evaluation, which is high by chance too."""
ENTROPY_STEPS = 20
"""Number of the last steps within which the entropy may not fall by half without progress."""
END_STEPS = 5
"""Number of steps in each of two means that are compared, as single steps are noisy."""
COLLAPSE, EXPLOSION = 0.5, 2.0
"""Factors on the earlier entropy beyond which it has collapsed, or risen too high."""
SOLVED = 0.9
"""Training accuracy above which a low entropy costs nothing: little is left to find."""


def run_warnings(
    records: Sequence[MetricRecord], evaluations: Sequence[EvaluationRecord]
) -> list[str]:
    """Return at most one text of each kind, about the last steps and the last evaluation.

    Numbers that a run did not measure cause none.
    """
    recent = records[-RECENT_STEPS:]
    found = (
        _solves_fewer(evaluations),
        _most_groups(
            recent,
            "groups/one_text_wrong",
            "have one text as all of their responses, and it is incorrect: the policy no longer "
            "tries anything else, so these groups teach nothing. See megadapo show RUN --fate "
            "all_wrong; return to an earlier checkpoint with a higher rollout.temperature or a "
            "lower trainer.optimizer.lr, or check that the prompts need different answers",
        ),
        _most_groups(
            recent,
            "groups/rejected_unequal",
            "were left out although their rewards differ, because all of their responses count as "
            "correct or all as incorrect. Set right_above in reward.functions between the good and "
            "the bad scores, or use no function that says what is correct: then all groups whose "
            "rewards differ are trained on",
        ),
        _failures(recent),
        _entropy(records),
        _bapo(records),
    )
    return [text for text in found if text is not None]


def _solves_fewer(evaluations: Sequence[EvaluationRecord]) -> str | None:
    """Return a warning if fewer problems are solved at all, and those more often."""
    sizes = [(one.samples_per_problem, one.num_problems) for one in evaluations]
    comparable = [
        one
        for one, size in zip(evaluations, sizes, strict=True)
        if size == sizes[-1] and one.accuracy is not None and one.best_of_all is not None
    ]
    if not comparable:
        return None
    newest, best = comparable[-1], max(comparable, key=lambda one: one.best_of_all or 0.0)
    solved, error = _pass_at_all(newest)
    for before, factor in ((comparable[0], 1.0), (best, BEST_FACTOR)):
        solved_before, error_before = _pass_at_all(before)
        rise, fall = newest.mean - before.mean, solved_before - solved
        rise_error = math.hypot(newest.standard_error, before.standard_error)
        if rise > factor * rise_error and fall > factor * math.hypot(error, error_before):
            num = newest.samples_per_problem
            return (
                f"held-out pass@{num} fell from {solved_before:.3f} (step {before.step}) to "
                f"{solved:.3f} (step {newest.step}) while avg@{num} rose from {before.mean:.3f} to "
                f"{newest.mean:.3f}, both by more than their standard errors: the policy gives "
                "the same answers more often and finds fewer others. See megadapo show RUN; "
                "return to an earlier checkpoint with a higher rollout.temperature or "
                "algorithm.objective.clip_high, a lower trainer.optimizer.lr, or more prompts"
            )
    return None


def _pass_at_all(evaluation: EvaluationRecord) -> tuple[float, float]:
    """Return pass@k of all samples and its standard error, over problems or sets of problems."""
    share, sets = evaluation.best_of_all or 0.0, evaluation.sets.values()
    sizes = [own["num_problems"] or 1.0 for own in sets] or [evaluation.num_problems]
    num_problems = len(sizes) * harmonic_mean(sizes)
    # two problems more of each kind, because a share of 0 or 1 would have no error
    near = (share * num_problems + 2.0) / (num_problems + 4.0)
    return share, math.sqrt(near * (1.0 - near) / (num_problems + 4.0))


def _most_groups(recent: Sequence[MetricRecord], name: str, meaning: str) -> str | None:
    """Return a warning if a metric counts most of the sampled groups."""
    counted = [one for one in recent if None not in (one.get(name), one.get("groups/sampled"))]
    num, total = (sum(one[key] or 0 for one in counted) for key in (name, "groups/sampled"))
    if not num > MOST_GROUPS * total:
        return None
    return f"{num:.0f} of {total:.0f} groups of {_span(counted)} {meaning}"


def _failures(recent: Sequence[MetricRecord]) -> str | None:
    """Return a warning if reward functions or environments fail on many responses."""
    shares: dict[str, list[float]] = defaultdict(list)
    for name, share in (one for record in recent for one in record.items()):
        if share is not None and name.endswith(f"/{FAILED}"):
            shares[name].append(share)
    means = {name: math.fsum(found) / len(found) for name, found in shares.items()}
    often = [f"{name} is {mean:.1%}" for name, mean in means.items() if mean > OFTEN_FAILED]
    if not often:
        return None
    return (
        f"{', '.join(often)} in {_span(recent)}: these responses are left out, or have the score "
        "of a failure instead of their own. log.txt has the reasons; mend what fails"
    )


def _entropy(records: Sequence[MetricRecord]) -> str | None:
    """Return a warning if the entropy collapses or explodes while the policy gets no better.

    A policy that learns loses entropy too, as the quickstart's does by half in seven steps: the
    loss is a collapse only beside an accuracy that does not rise.
    """
    known = [one for one in records if math.isfinite(_value(one, "policy/entropy"))]
    window = known[-ENTROPY_STEPS:]
    if len(window) < ENTROPY_STEPS or _improves(window):
        return None
    start, before, last = (
        fmean(_value(one, "policy/entropy") for one in part)
        for part in (known[:END_STEPS], window[:END_STEPS], window[-END_STEPS:])
    )
    beside = f"while the policy got no better in {_span(window)}"
    if last < COLLAPSE * before:
        return (
            f"policy/entropy fell from {before:.3f} to {last:.3f} {beside}: it no longer explores. "
            "Return to an earlier checkpoint with algorithm.entropy_control.target near the "
            "entropy that it had there, a higher algorithm.objective.clip_high, or "
            'algorithm.objective.gate = "clip_cov" or "kl_cov"'
        )
    if last > EXPLOSION * start:
        return (
            f"policy/entropy rose from {start:.3f} in {_span(known[:END_STEPS])} to {last:.3f} "
            f"{beside}: see megadapo show RUN whether responses become gibberish. Return to an "
            "earlier checkpoint with a lower trainer.optimizer.lr, algorithm.objective.clip_high "
            "or entropy_coef, or a lower algorithm.entropy_control.target"
        )
    return None


def _bapo(records: Sequence[MetricRecord]) -> str | None:
    """Return a warning if BAPO's bounds never moved, or were at their ends in every update."""
    records = [one for one in records if one.get("bapo/share") is not None]
    low, high, before, after = (
        [_value(one, f"bapo/{name}") for one in records]
        for name in ("clip_low", "clip_high", "share_before", "share")
    )
    constant = all(math.isclose(a, b[0]) for b in (low, high) for a in b)
    if len(records) < RECENT_STEPS or not constant:
        return None
    return (
        f"BAPO's bounds were {low[0]:g} and {high[0]:g} in every update of {_span(records)} (share "
        f"of positive tokens {fmean(before):.2f} before its search, {fmean(after):.2f} after it). "
        "A share above algorithm.bapo.target_share needs no move: set "
        'algorithm.bapo.statistic = "logit_share" or a higher target. One below is out of reach: '
        "set a lower target or wider algorithm.bapo.low and high"
    )


def _improves(window: Sequence[MetricRecord]) -> bool:
    """Return whether accuracy, or reward without one, rises by more than its standard error.

    Also if it is not known, or almost all responses are correct.
    """
    has_accuracy = window[-1].get("accuracy/mean") is not None
    name = "accuracy/mean" if has_accuracy else "reward/mean"
    first, last = (
        [_value(one, name) for one in part] for part in (window[:END_STEPS], window[-END_STEPS:])
    )
    if not all(map(math.isfinite, first + last)):
        return True
    error = math.sqrt((variance(first) + variance(last)) / END_STEPS)
    return fmean(last) - fmean(first) > error or (has_accuracy and fmean(last) > SOLVED)


def _value(record: MetricRecord, name: str) -> float:
    """Return a metric; NaN if it was not measured."""
    value = record.get(name)
    return math.nan if value is None else float(value)


def _span(records: Sequence[MetricRecord]) -> str:
    return f"steps {records[0]['step']} to {records[-1]['step']}"
