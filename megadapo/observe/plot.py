"""One PNG that shows whether a run is healthy; several runs are drawn over each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.errors import DataError
from megadapo.observe.metrics import (
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    read_evaluations,
    read_metrics,
    unused_share,
)

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

    runs = [_Run.read(folder) for folder in folders]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17.5, 7.5), layout="constrained")
        panels = list(figure.subplots(2, 4).flat)
        for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
            for panel, draw in zip(panels, _PANELS, strict=True):
                draw(panel, run, colour)
        for panel in panels:
            finish(panel)
        figure.suptitle(_title(runs), fontsize=13)
        if len(runs) > 1:
            _name_runs(figure, runs)
        save(figure, output)
    return output


@dataclass(frozen=True)
class _Run:
    name: str
    records: list[MetricRecord]
    evaluations: list[EvaluationRecord]

    @classmethod
    def read(cls, folder: Path) -> _Run:
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


def _line(axes: Axes, run: _Run, name: str, colour: str, label: str, **style: Any) -> None:
    _curve(axes, *run.series(name), color=colour, label=label, **style)


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], **style: Any) -> None:
    if steps:
        # A line through one point is invisible: short runs get markers.
        axes.plot(steps, values, marker="o" if len(steps) < 3 else None, **style)


def _tail(axes: Axes, run: _Run, name: str, colour: str, longest: str) -> None:
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


def _accuracy(axes: Axes, run: _Run, colour: str) -> None:
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


def _length(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Response length (tokens)")
    _line(axes, run, "response_length/mean", colour, "mean")
    _tail(axes, run, "response_length/{}", colour, "longest")


def _entropy(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Entropy (nats per token)")
    _line(axes, run, "policy/entropy", colour, "entropy")


def _reward(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Reward")
    _line(axes, run, "reward/mean", colour, "mean")


def _clip(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Clipped tokens (fraction)")
    _line(axes, run, "policy/clip_high_fraction", colour, "above 1 + clip_high")
    _line(axes, run, "policy/clip_low_fraction", colour, "below 1 - clip_low", linestyle="--")


def _parity(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Trainer vs engine |log-prob gap| (nats)")
    if any(value > 0 for value in run.series("parity/logprob_abs_max")[1]):
        # Exact agreement is 0, which a logarithmic axis leaves out: a gap in the line shows it.
        axes.set_yscale("log")
    _line(axes, run, "parity/logprob_abs_max", colour, "largest")
    _line(axes, run, "parity/logprob_abs_mean", colour, "mean", linestyle="--")


def _group_time(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Time of a group (s)")
    _line(axes, run, "time/group_p50_s", colour, "median")
    _tail(axes, run, "time/group_{}_s", colour, "slowest")


def _use(axes: Axes, run: _Run, colour: str) -> None:
    axes.set_title("Use of engines and tokens (share)")
    axes.set_ylim(-0.02, 1.02)
    _line(axes, run, "rollout/engine_busy_share", colour, "engines busy")
    _line(axes, run, "rollout/slot_use", colour, "their places taken", linestyle="--")
    shares = [(float(r["step"] or 0), unused_share(r)) for r in run.records]
    unused = [(step, share) for step, share in shares if share is not None]
    steps, values = [step for step, _ in unused], [share for _, share in unused]
    _curve(axes, steps, values, color=colour, linestyle=":", label="tokens not trained on")
    axes.fill_between(steps, values, color=colour, alpha=0.2, linewidth=0)


_PANELS = (_accuracy, _length, _entropy, _group_time, _reward, _clip, _parity, _use)


def finish(axes: Axes) -> None:
    """Give a panel its axes and legend, or say that nothing of it was measured."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    # Runs drawn over each other share the meaning of a line style: name each style once.
    once = dict(zip(reversed(labels), reversed(handles), strict=True))
    if len(once) > 1:
        # Headroom so that the legend does not lie on the curves.
        axes.margins(y=0.12 * max(len(once), 2))
        if axes.get_yscale() == "linear" and axes.dataLim.ymin >= 0 > axes.get_ylim()[0]:
            axes.set_ylim(bottom=0)
        axes.legend(reversed(once.values()), reversed(once.keys()), loc="best")
    elif not once:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_GREY)


def _title(runs: Sequence[_Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    last = runs[0].records[-1]["step"]
    return f"{runs[0].name}: {last} step{'s' if last != 1 else ''}"


def _name_runs(figure: Figure, runs: Sequence[_Run]) -> None:
    from matplotlib.lines import Line2D

    colours = itertools.cycle(COLOURS)
    handles = [Line2D([], [], color=next(colours), label=run.name) for run in runs]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 5))


def save(figure: Figure, output: Path) -> None:
    """Write a figure as PNG.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, format="png")
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from error
