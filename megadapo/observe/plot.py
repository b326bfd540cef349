"""One PNG that shows whether a run is healthy; several runs are drawn over each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.errors import DataError, InfraError
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
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

PLOT_FILE = "plot.png"

# Okabe and Ito's palette: told apart with every common colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#666666"
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": _GREY,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}


def plot_run(folder: Path) -> Path:
    """Draw one run into `plot.png` of its folder and return that path."""
    return plot_runs([folder], folder / PLOT_FILE)


def plot_runs(folders: Sequence[Path], output: Path) -> Path:
    """Draw runs over each other into one PNG, each in its own colour.

    Raises DataError for a folder without recorded steps.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = [PlottedRun.read(folder) for folder in folders]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17.5, 11.0), layout="constrained")
        panels = list(figure.subplots(3, 4).flat)
        for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
            for panel, draw in zip(panels, PANELS, strict=True):
                draw(panel, run, colour)
        for panel in panels:
            finish(panel)
        last = runs[0].records[-1]["step"]
        title = f"{runs[0].name}: {last} step{'s' if last != 1 else ''}"
        if len(runs) > 1:
            title = f"{len(runs)} runs"
            colours = itertools.cycle(COLOURS)
            names = [Line2D([], [], color=next(colours), label=run.name) for run in runs]
            figure.legend(handles=names, loc="outside lower center", ncols=min(len(runs), 5))
        figure.suptitle(title, fontsize=13)
        save(figure, output)
    return output


def finish(axes: Axes) -> None:
    """Add axes and legend to a panel, or the words "not measured"."""
    from matplotlib.ticker import MaxNLocator

    if not axes.get_xlabel():
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    # All runs share the meaning of a line style, so each style is named once.
    once = dict(zip(reversed(labels), reversed(handles), strict=True))
    if len(once) > 1:
        # Headroom keeps the legend off the curves.
        axes.margins(y=0.12 * max(len(once), 2))
        if axes.get_yscale() == "linear" and axes.dataLim.ymin >= 0 > axes.get_ylim()[0]:
            axes.set_ylim(bottom=0)
        axes.legend(reversed(once.values()), reversed(once.keys()), loc="best")
    elif not once:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_GREY)


def save(figure: Figure, output: Path) -> None:
    """Write a figure as PNG.

    Raises:
        InfraError: the file cannot be written; a finished run's supervisor tries again.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, format="png")
    except OSError as error:
        raise InfraError(f"{output}: cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class PlottedRun:
    """The recorded numbers of one run that its plot shows."""

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
    """Draw the 95th percentile and the maximum of a metric family.

    The area between median and 95th percentile is filled over the steps that have both.

    Args:
        name: metric name with {} in place of p50, p95 and max.
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


def _lines(title: str, labels: Mapping[str, str], axes: Axes, run: PlottedRun, colour: str) -> None:
    """Draw one or two metrics, given with their labels; the second line is dashed."""
    axes.set_title(title)
    for (name, label), style in zip(labels.items(), ("-", "--"), strict=False):
        _line(axes, run, name, colour, label, linestyle=style)


def _parity(axes: Axes, run: PlottedRun, colour: str) -> None:
    if any(value > 0 for value in run.series("parity/logprob_abs_max")[1]):
        # Exact agreement is 0, which a logarithmic axis leaves out: a gap in the line shows it.
        axes.set_yscale("log")
    labels = {"parity/logprob_abs_max": "largest", "parity/logprob_abs_mean": "mean"}
    _lines("Trainer vs engine |log-prob gap| (nats)", labels, axes, run, colour)


def _group_time(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Time of a group (s)")
    _line(axes, run, "time/group_p50_s", colour, "median")
    _tail(axes, run, "time/group_{}_s", colour, "slowest")


def _use(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_title("Use of engines and tokens (share)")
    axes.set_ylim(-0.02, 1.02)
    _line(axes, run, "rollout/engine_busy_share", colour, "engines busy")
    _line(axes, run, "rollout/slot_use", colour, "slots in use", linestyle="--")
    shares = [(float(r["step"] or 0), unused_share(r)) for r in run.records]
    unused = [(step, share) for step, share in shares if share is not None]
    steps, values = [step for step, _ in unused], [share for _, share in unused]
    _curve(axes, steps, values, color=colour, linestyle=":", label="tokens not trained on")
    axes.fill_between(steps, values, color=colour, alpha=0.2, linewidth=0)


def _watched(axes: Axes, run: PlottedRun, colour: str) -> None:
    axes.set_ylim(-0.02, 1.02)
    labels = {
        "policy/token_probability_mean": "mean probability",
        "policy/positive_gradient_share": "gradient share of positive tokens",
    }
    _lines("Tokens trained on", labels, axes, run, colour)


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


def _by_accuracy(axes: Axes, run: PlottedRun, colour: str, *, name: str, title: str) -> None:
    """Draw a metric against training accuracy, one point a step, the last one marked."""
    axes.set_title(f"{title} against accuracy")
    axes.set_xlabel("training accuracy")
    accuracy, values = (dict(zip(*run.series(one), strict=True)) for one in ("accuracy/mean", name))
    steps = sorted(accuracy.keys() & values.keys())
    if not steps:
        return
    x, y = [accuracy[step] for step in steps], [values[step] for step in steps]
    axes.plot(x, y, color=colour, alpha=0.6, linewidth=1.0, marker=".", label="each step")
    axes.plot(x[-1:], y[-1:], color=colour, marker="o", linestyle="none", label="the last step")


PANELS: tuple[Callable[[Axes, PlottedRun, str], None], ...] = (
    *(_accuracy, _length),
    partial(_lines, "Entropy (nats per token)", {"policy/entropy": "entropy"}),
    _group_time,
    partial(_lines, "Reward", {"reward/mean": "mean"}),
    partial(
        _lines,
        "Clipped tokens (fraction)",
        {
            "policy/clip_high_fraction": "above 1 + clip_high",
            "policy/clip_low_fraction": "below 1 - clip_low",
        },
    ),
    *(_parity, _use),
    partial(_by_accuracy, name="response_length/mean", title="Length (tokens)"),
    partial(_by_accuracy, name="policy/entropy", title="Entropy (nats)"),
    *(_watched, _reflection),
)
"""Functions that draw one run in one colour, in reading order."""
