"""What is measured of a run, and what several runs of a row come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadapo.observe.metrics.records import (
    EvaluationRecord,
    MetricRecord,
    read_evaluations,
    read_metrics,
)

END_STEPS = 5
"""Steps that count as the end of a run: a single one is too noisy."""

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; beyond, the last is wider than
# the right one.
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What a run recorded."""

    steps: list[MetricRecord]
    evaluations: list[EvaluationRecord]

    @classmethod
    def read(cls, folder: Path) -> RunRecords:
        return cls(steps=read_metrics(folder), evaluations=read_evaluations(folder))

    def values(self, name: str, last: int = 0) -> list[float]:
        """A metric's finite values, of the last steps or (0) of all."""
        found = (record.get(name) for record in self.steps[-last:])
        return [float(value) for value in found if value is not None and math.isfinite(value)]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run."""

    name: str
    label: str
    form: str
    """How a value is written."""
    of: Callable[[RunRecords, float], float | None]
    """Of a run's records and the accuracy that steps are counted to; None: not measured."""


def _at_end(name: str) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: _mean(run.values(name, END_STEPS))


def _over_run(name: str) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: _mean(run.values(name))


def _total(name: str) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: sum(run.values(name)) if run.values(name) else None


def _held_out(which: int) -> Callable[[RunRecords, float], float | None]:
    return lambda run, _: run.evaluations[which].accuracy if run.evaluations else None


def _steps_to_accuracy(run: RunRecords, accuracy: float) -> float | None:
    return next((float(e.step) for e in run.evaluations if e.accuracy >= accuracy), None)


def _without_signal(run: RunRecords, _: float) -> float | None:
    shares = [share_without_signal(record) for record in run.steps]
    return _mean([share for share in shares if share is not None])


def share_without_signal(record: MetricRecord) -> float | None:
    """Of the groups that a step sampled, those all right or all wrong; None where there are none.

    Their advantages are 0 but for a length punishment.
    """
    sampled = record.get("groups/sampled")
    counts = [record.get(f"groups/{name}") for name in ("all_correct", "all_wrong")]
    return sum(count or 0 for count in counts) / sampled if sampled else None


def _trained_without_signal(run: RunRecords, _: float) -> float | None:
    shares = [share_trained_without_signal(record) for record in run.steps]
    return _mean([share for share in shares if share is not None])


def share_trained_without_signal(record: MetricRecord) -> float | None:
    """Of the groups that a step trained on, those without a signal; None where it had no group."""
    kept, share = record.get("groups/kept"), share_without_signal(record)
    if not kept or share is None:
        return None
    sampled, reserved = record.get("groups/sampled") or 0, record.get("groups/from_reserve") or 0
    return max(0.0, kept - reserved - (1.0 - share) * sampled) / kept


MEASURES = (
    Measure(name="held_out_before", label="held-out before", form="{:.3f}", of=_held_out(0)),
    Measure(name="held_out_after", label="held-out after", form="{:.3f}", of=_held_out(-1)),
    Measure(
        name="steps_to_accuracy",
        label="steps to accuracy",
        form="{:.1f}",
        of=_steps_to_accuracy,
    ),
    Measure(name="entropy", label="entropy", form="{:.4f}", of=_at_end("policy/entropy")),
    Measure(
        name="response_length",
        label="length",
        form="{:.1f}",
        of=_at_end("response_length/mean"),
    ),
    Measure(
        name="truncated",
        label="truncated",
        form="{:.3%}",
        of=_over_run("response_length/truncated_fraction"),
    ),
    Measure(name="no_signal", label="no signal", form="{:.1%}", of=_without_signal),
    Measure(
        name="no_signal_trained",
        label="no signal, trained",
        form="{:.1%}",
        of=_trained_without_signal,
    ),
    Measure(
        name="clip_low",
        label="clipped low",
        form="{:.3%}",
        of=_over_run("policy/clip_low_fraction"),
    ),
    Measure(
        name="clip_high",
        label="clipped high",
        form="{:.3%}",
        of=_over_run("policy/clip_high_fraction"),
    ),
    Measure(name="tokens", label="tokens generated", form="{:,.0f}", of=_total("tokens/generated")),
    Measure(name="seconds", label="seconds", form="{:.1f}", of=_total("time/step_s")),
)
"""What is measured of every run, in the order of the table."""

Measured = Mapping[str, float | None]
"""Measures of one run by name."""


def measure(folder: Path, accuracy: float) -> dict[str, float | None]:
    """Every measure of a run; None where it was not measured."""
    records = RunRecords.read(folder)
    return {one.name: one.of(records, accuracy) for one in MEASURES}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Values of several seeds."""

    mean: float
    standard_error: float | None
    """Of the mean; None for a single seed."""
    num: int
    """Seeds with a value."""

    @property
    def is_zero(self) -> bool:
        """Of values that are all 0, and at least two."""
        return self.mean == 0.0 and self.standard_error == 0.0

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """None where no seed has a value."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), standard_error=error, num=len(known))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far the differences between two rows scatter over seeds, pooled over all comparisons.

    Two or three seeds that happen to agree would make any difference look certain; all rows
    together say what the same change of seed does elsewhere.
    """

    deviation: float
    num_free: int
    """Degrees of freedom: seeds less one, of every comparison."""

    @classmethod
    def of(cls, differences: Sequence[Spread | None]) -> Noise | None:
        """None where no row has two seeds, or none differs from its other in any of them."""
        squares = num_free = 0.0
        for one in differences:
            # rows whose runs are the same have no noise to add
            if one is not None and one.standard_error is not None and not one.is_zero:
                squares += (one.num - 1) * one.num * one.standard_error**2
                num_free += one.num - 1
        if not num_free:
            return None
        return cls(deviation=math.sqrt(squares / num_free), num_free=int(num_free))

    def interval(self, difference: Spread) -> tuple[float, float]:
        """95 % interval of a mean difference by Student's t."""
        quantile = _T_QUANTILES[min(self.num_free, len(_T_QUANTILES)) - 1]
        half = quantile * self.deviation / math.sqrt(difference.num)
        return difference.mean - half, difference.mean + half


def difference(
    row: Mapping[int, Measured], other: Mapping[int, Measured], name: str
) -> Spread | None:
    """One measure of a row less that of another, seed by seed; None where a seed lacks it.

    Steps to an accuracy are lacking where a run did not get there: a mean over those that did would
    leave the slowest out.

    Args:
        row: measures by seed.
        other: measures by seed; seeds that only one of both has are left out.
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
