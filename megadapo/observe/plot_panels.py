"""The panels of a run's plot: what is drawn of one run into one pair of axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.errors import DataError
from megadapo.observe.metrics.records import (
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    read_evaluations,
    read_metrics,
    unused_share,
)
from megadapo.observe.metrics.reflection import ANY_PHRASE, AREA

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class PlottedRun:
    """What is drawn of a run."""

    name: str
    records: list[MetricRecord]
    evaluations: list[EvaluationRecord]

    @classmethod
    def read(cls, folder: Path) -> PlottedRun:
        """Read a run folder.

        Raises:
            DataError: it has no recorded steps.
        """
        records = read_metrics(folder)
        if not records:
            raise DataError(
                f"{folder}: no steps are recorded in {METRICS_FILE}, so there is nothing to plot"
            )
        return cls(folder.resolve().name, records, read_evaluations(folder))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps at which a metric was measured, and its values."""
        pairs = [
            (float(r["step"] or 0), float(value))
            for r in self.records
            if (value := r.get(name)) is not None
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]


def _line(axes: Axes, run: PlottedRun, name: str, colour: str, label: str, **style: Any) -> None:
    _curve(axes, *run.series(name), color=colour, label=label, **style)


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], **style: Any) -> None:
    if steps:
        # A line through one point is invisible: short runs get markers.
        axes.plot(steps, values, marker="o" if len(steps) < 3 else None, **style)


def _tail(axes: Axes, run: PlottedRun, name: str, colour: str, longest: str) -> None:
    """Draw the 95th percentile and the maximum of what `name`, with a {}, is a metric of.

    The space between median and 95th percentile is filled, over the steps that have both.
    """
    _line(axes, run, name.format("max"), colour, longest, alpha=0.5, linestyle="--")
    median, p95 = (dict(zip(*run.series(name.format(q)), strict=True)) for q in ("p50", "p95"))
    steps = sorted(median.keys() & p95.keys())
    if len(steps) < 2:  # nothing to fill
        _line(axes, run, name.format("p95"), colour, "95th percentile", alpha=0.5, linestyle=":")
        return
    pair = [median[step] for step in steps], [p95[step] for step in steps]
    label = "median to 95th percentile"
    axes.fill_between(steps, *pair, color=colour, alpha=0.2, linewidth=0, label=label)


def _accuracy(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Accuracy")
    axes.set_ylim(-0.02, 1.02)
    _line(axes, run, "accuracy/mean", colour, "train (all sampled)", alpha=0.55)
    if not run.evaluations:
        return
    steps = [e.step for e in run.evaluations]
    mean = [e.accuracy for e in run.evaluations]
    low = [e.accuracy - e.standard_error for e in run.evaluations]
    high = [e.accuracy + e.standard_error for e in run.evaluations]
    samples = run.evaluations[-1].samples_per_problem
    label = f"held-out avg@{samples} \u00b1 standard error"
    axes.plot(steps, mean, color=colour, marker="o", markersize=5, linestyle="--", label=label)
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _length(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Response length (tokens)")
    _line(axes, run, "response_length/mean", colour, "mean")
    _tail(axes, run, "response_length/{}", colour, "longest")


def _entropy(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Entropy (nats per token)")
    _line(axes, run, "policy/entropy", colour, "entropy")


def _reward(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Reward")
    _line(axes, run, "reward/mean", colour, "mean")


def _clip(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Clipped tokens (fraction)")
    _line(axes, run, "policy/clip_high_fraction", colour, "above 1 + clip_high")
    _line(axes, run, "policy/clip_low_fraction", colour, "below 1 - clip_low", linestyle="--")


def _parity(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Trainer vs engine |log-prob gap| (nats)")
    if any(value > 0 for value in run.series("parity/logprob_abs_max")[1]):
        # Exact agreement is 0, which a logarithmic axis leaves out: a gap in the line shows it.
        axes.set_yscale("log")
    _line(axes, run, "parity/logprob_abs_max", colour, "largest")
    _line(axes, run, "parity/logprob_abs_mean", colour, "mean", linestyle="--")


def _group_time(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Time of a group (s)")
    _line(axes, run, "time/group_p50_s", colour, "median")
    _tail(axes, run, "time/group_{}_s", colour, "slowest")


def _use(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Use of engines and tokens (share)")
    axes.set_ylim(-0.02, 1.02)
    _line(axes, run, "rollout/engine_busy_share", colour, "engines busy")
    _line(axes, run, "rollout/slot_use", colour, "their places taken", linestyle="--")
    shares = [(float(r["step"] or 0), unused_share(r)) for r in run.records]
    unused = [(step, share) for step, share in shares if share is not None]
    steps, values = [step for step, _ in unused], [share for _, share in unused]
    _curve(axes, steps, values, color=colour, linestyle=":", label="tokens not trained on")
    axes.fill_between(steps, values, color=colour, alpha=0.2, linewidth=0)


def _watched(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Tokens trained on")
    axes.set_ylim(-0.02, 1.02)
    _line(axes, run, "policy/token_probability_mean", colour, "mean probability")
    label = "positive ones' share of the gradient"
    _line(axes, run, "policy/positive_gradient_share", colour, label, linestyle="--")


def _reflection(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Looking back (share of responses)")
    _line(axes, run, ANY_PHRASE, colour, "any phrase")
    names = dict.fromkeys(name for record in run.records for name in record)
    phrases = [name for name in names if name.startswith(AREA) and name != ANY_PHRASE]
    styles = itertools.cycle((":", "--", "-."))
    for name, style in zip(phrases, styles, strict=False):
        if any(run.series(name)[1]):
            label = name.removeprefix(AREA).replace("_", " ")
            _line(axes, run, name, colour, label, alpha=0.6, linestyle=style, linewidth=1.0)


def _length_by_accuracy(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Length (tokens) against accuracy")
    _by_accuracy(axes, run, "response_length/mean", colour)


def _entropy_by_accuracy(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Entropy (nats) against accuracy")
    _by_accuracy(axes, run, "policy/entropy", colour)


def _by_accuracy(axes: Axes, run: PlottedRun, name: str, colour: str) -> None:
    """The way of a run, step by step, to where its last step stands."""
    axes.set_xlabel("training accuracy")
    accuracy, values = (dict(zip(*run.series(one), strict=True)) for one in ("accuracy/mean", name))
    steps = sorted(accuracy.keys() & values.keys())
    if not steps:
        return
    x, y = [accuracy[step] for step in steps], [values[step] for step in steps]
    axes.plot(x, y, color=colour, alpha=0.6, linewidth=1.0, marker=".", label="each step")
    axes.plot(x[-1:], y[-1:], color=colour, marker="o", linestyle="none", label="the last step")


PANELS = (
    *(_accuracy, _length, _entropy, _group_time),
    *(_reward, _clip, _parity, _use),
    *(_length_by_accuracy, _entropy_by_accuracy, _watched, _reflection),
)
"""Each draws one run in one colour."""
