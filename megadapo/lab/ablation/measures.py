"""Measures of a run, and their statistics over the seeds of a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.run_records import RunRecords

END_STEPS = 5
"""Number of last steps in an average at the end of a run; a single one is too noisy."""

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. Beyond the last one the
# interval is a little too wide.
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def _values(run: RunRecords, name: str, last: int = 0) -> list[float]:
    """Return a metric's finite values in the last steps, or in all for 0."""
    found = (record.get(name) for record in run.steps[-last:])
    return [float(value) for value in found if value is not None and math.isfinite(value)]


class Measure(NamedTuple):
    """A measure: one number per run."""

    name: str
    label: str
    form: str
    """Format of a value, such as ".3f"."""
    of: Callable[[RunRecords, float], float | None]
    """Function of the records and the accuracy that ends the count of steps; None if missing."""


def _average(name: str, last: int = 0) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: _mean(_values(run, name, last))


def _total(*names: str) -> Callable[[RunRecords, float], float | None]:
    def total(run: RunRecords, _: float) -> float | None:
        values = [value for name in names for value in _values(run, name)]
        return sum(values) if values else None

    return total


def _held_out(which: int) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: run.evaluations[which].accuracy if run.evaluations else None


def _steps_to_accuracy(run: RunRecords, accuracy: float) -> float | None:
    return next((float(e.step) for e in run.evaluations if (e.accuracy or 0.0) >= accuracy), None)


def _total_to_accuracy(*names: str) -> Callable[[RunRecords, float], float | None]:
    def total(run: RunRecords, accuracy: float) -> float | None:
        last = _steps_to_accuracy(run, accuracy)
        if last is None:
            return None
        steps = [record for record in run.steps if (record["step"] or 0) <= last]
        return sum(record.get(name) or 0.0 for record in steps for name in names)

    return total


def _mean_share(
    share: Callable[[MetricRecord], float | None],
) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: _mean([one for one in map(share, run.steps) if one is not None])


def not_mixed_share(record: MetricRecord) -> float | None:
    """Return the share of a step's sampled groups that are all correct or all incorrect.

    Their advantages are 0 except for a length penalty. Without groups there is no result.
    """
    sampled = record.get("groups/sampled")
    counts = [record.get(f"groups/{name}") for name in ("all_correct", "all_wrong")]
    return sum(count or 0 for count in counts) / sampled if sampled else None


def trained_not_mixed_share(record: MetricRecord) -> float | None:
    """Return the share of a step's trained groups that are not mixed; None without groups."""
    kept, share = record.get("groups/kept"), not_mixed_share(record)
    if not kept or share is None:
        return None
    sampled, reserved = record.get("groups/sampled") or 0, record.get("groups/from_reserve") or 0
    return max(0.0, kept - reserved - round((1.0 - share) * sampled)) / kept


# a stopped group has cost its tokens: without them dynamic sampling would look cheaper than it is
_TOKENS = ("tokens/generated", "tokens/stopped")

MEASURES = (
    Measure("held_out_before", "held-out before", ".3f", _held_out(0)),
    Measure("held_out_after", "held-out after", ".3f", _held_out(-1)),
    Measure("steps_to_accuracy", "steps to accuracy", ".1f", _steps_to_accuracy),
    Measure("tokens_to_accuracy", "tokens to accuracy", ",.0f", _total_to_accuracy(*_TOKENS)),
    Measure("seconds_to_accuracy", "seconds to accuracy", ".1f", _total_to_accuracy("time/step_s")),
    Measure("entropy", "entropy", ".4f", _average("policy/entropy", END_STEPS)),
    Measure("response_length", "length", ".1f", _average("response_length/mean", END_STEPS)),
    Measure("truncated", "truncated", ".3%", _average("response_length/truncated_fraction")),
    Measure("no_signal", "no signal", ".1%", _mean_share(not_mixed_share)),
    Measure("no_signal_trained", "no signal, trained", ".1%", _mean_share(trained_not_mixed_share)),
    Measure("clip_low", "clipped low", ".3%", _average("policy/clip_low_fraction")),
    Measure("clip_high", "clipped high", ".3%", _average("policy/clip_high_fraction")),
    Measure(
        "clip_high_probability",
        "their probability",
        ".3f",
        _average("policy/clip_high_probability"),
    ),
    Measure("bapo_low", "BAPO's low", ".3f", _average("bapo/clip_low")),
    Measure("bapo_high", "BAPO's high", ".3f", _average("bapo/clip_high")),
    Measure("tokens", "tokens generated", ",.0f", _total(*_TOKENS)),
    Measure("seconds", "seconds", ".1f", _total("time/step_s")),
)
"""Measures of every run, in the order of the table's columns."""

Measured = Mapping[str, float | None]
"""Measures of one run by name."""


def measure(run: RunRecords, accuracy: float) -> dict[str, float | None]:
    """Return every measure of a run; None if missing."""
    return {measure.name: measure.of(run, accuracy) for measure in MEASURES}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard error over seeds."""

    mean: float
    standard_error: float | None
    """Standard error of the mean; None for a single seed."""
    num: int
    """Number of seeds with a value."""

    @property
    def is_zero(self) -> bool:
        """Whether there are at least two values and all are 0."""
        return self.mean == 0.0 and self.standard_error == 0.0

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return the spread of the known values; None without any."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), standard_error=error, num=len(known))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviation of differences between two rows over seeds, pooled over all comparisons.

    Two or three seeds that agree by chance would make any difference look certain. The pooled value
    includes the effect of the seed on the other rows.
    """

    deviation: float
    num_free: int
    """Degrees of freedom: the sum of (seeds - 1) over the comparisons."""

    @classmethod
    def of(cls, differences: Sequence[Spread | None]) -> Noise | None:
        """Pool differences; None unless a comparison with two seeds differs in one of them."""
        squares = num_free = 0.0
        for difference in differences:
            # rows with identical results say nothing of the noise
            if (
                difference is not None
                and difference.standard_error is not None
                and not difference.is_zero
            ):
                squares += (difference.num - 1) * difference.num * difference.standard_error**2
                num_free += difference.num - 1
        if not num_free:
            return None
        return cls(deviation=math.sqrt(squares / num_free), num_free=int(num_free))

    def interval(self, difference: Spread) -> tuple[float, float]:
        """Return the 95 % interval of a mean difference by Student's t.

        It is the wider of the pooled one and the difference's own: a row that scatters more than
        the others would look certain by their agreement.
        """
        half = _quantile(self.num_free) * self.deviation / math.sqrt(difference.num)
        if difference.standard_error is not None:
            half = max(half, _quantile(difference.num - 1) * difference.standard_error)
        return difference.mean - half, difference.mean + half


def _quantile(num_free: int) -> float:
    return _T_QUANTILES[min(num_free, len(_T_QUANTILES)) - 1]


def difference(
    row: Mapping[int, Measured], other: Mapping[int, Measured], name: str
) -> Spread | None:
    """Return one measure of a row minus another row's, paired by seed; None if a seed lacks it.

    Steps, tokens and seconds to an accuracy are missing for runs that never reach it: a mean over
    the others would omit the slowest ones.

    Args:
        row: measures by seed.
        other: measures by seed; seeds without a partner are ignored.
    """
    found = []
    for seed in [seed for seed in row if seed in other]:
        one, two = row[seed].get(name), other[seed].get(name)
        if one is None or two is None:
            return None
        found.append(one - two)
    return Spread.of(found)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
