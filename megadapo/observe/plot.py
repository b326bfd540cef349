"""One PNG that shows whether a run is healthy; several runs are drawn over each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megadapo.observe.files import replaced
from megadapo.observe.metrics.panel import Panel
from megadapo.observe.panels import HELD_OUT, sections_with_values
from megadapo.observe.run_records import RunRecords
from megadapo.observe.tables import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

PLOT_FILE = "plot.png"

# Okabe and Ito's palette: told apart with every common colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#666666"
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
NUM_COLUMNS = 4
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


def plot_runs(folders: Sequence[Path], output: Path) -> Path:
    """Draw runs over each other into one PNG, each in its own colour."""
    import matplotlib

    runs = [RunRecords(folder) for folder in folders]
    for run in runs:
        run.need_steps()
    with matplotlib.rc_context(STYLE):
        save(draw_runs(runs), output)
    return output


def draw_runs(runs: Sequence[RunRecords]) -> Figure:
    """Return a figure of the panels in which any of the runs has values."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    steps = (record for run in runs for record in run.steps)
    names = dict.fromkeys(
        name for record in steps for name, value in record.items() if value is not None
    )
    if any(run.evaluations for run in runs):
        names[HELD_OUT] = None
    sections = sections_with_values(names)
    panels = [panel for _, shown in sections for panel in shown if panel.in_plot]
    num_rows = math.ceil(len(panels) / NUM_COLUMNS) or 1
    figure = Figure(figsize=(17.5, 3.4 * num_rows + 0.8), layout="constrained")
    places = list(figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat)
    for axes, panel in zip(places, panels, strict=False):
        _draw_panel(axes, panel, runs)
        finish(axes)
    for axes in places[len(panels) :]:
        axes.remove()
    last = int(runs[0].steps[-1]["step"] or 0)
    title = f"{runs[0].folder.resolve().name}: {count(last, 'step')}"
    if len(runs) > 1:
        title = f"{len(runs)} runs"
        colours = itertools.cycle(COLOURS)
        handles = [
            Line2D([], [], color=next(colours), label=run.folder.resolve().name) for run in runs
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 5))
    figure.suptitle(title, fontsize=13)
    return figure


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
        num_columns = 1 if len(once) < 4 else 2
        num_rows = math.ceil(len(once) / num_columns)
        # Headroom keeps the legend off the curves.
        if axes.get_yscale() == "linear":
            low, high = axes.get_ylim()
            low = 0.0 if axes.dataLim.ymin >= 0.0 > low else low
            axes.set_ylim(low, high + (high - low) * 0.1 * num_rows)
        else:
            axes.margins(y=0.12 * num_rows)
        axes.legend(list(reversed(once.values())), list(reversed(once.keys())), ncols=num_columns)
    elif not once:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_GREY)


def save(figure: Figure, output: Path) -> None:
    """Write a figure as PNG.

    Raises:
        InfraError: the file cannot be written; a finished run's supervisor tries again.
    """
    with replaced(output, with_folder=True) as fresh:
        figure.savefig(fresh, dpi=130, format="png")


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RunRecords]) -> None:
    """Draw a panel: a colour is a run; if there is only one run, a colour is a metric."""
    axes.set_title(panel.title, loc="left")
    axes.set_title(panel.unit, loc="right", fontsize=8, fontweight="normal", color=_GREY)
    values = [value for run in runs for name in panel.lines for value in run.series(name).values()]
    if panel.log and any(0.0 < value < math.inf for value in values):
        # Exact agreement is 0, which a logarithmic axis leaves out: a gap in the line shows it.
        axes.set_yscale("log")
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        if panel.against:
            _draw_against(axes, panel, run, colour)
            continue
        for line, (name, label) in enumerate(panel.lines.items()):
            series = run.series(name)
            look = _look(colour, line, len(runs))
            # A line through one point is invisible: short runs get markers.
            look |= {"marker": "o" if len(series) < 3 else None}
            if series:
                axes.plot(list(series), list(series.values()), label=label, **look)
        if panel.band:
            # the area between two metrics over the steps that have both
            high, low, *name_of_area = panel.band
            tops, bottoms = run.series(high), run.series(low)
            steps = sorted(tops.keys() & bottoms.keys())
            areas = [tops[step] for step in steps], [bottoms[step] for step in steps]
            area = name_of_area[0] if name_of_area else None
            axes.fill_between(steps, *areas, color=colour, alpha=0.15, linewidth=0, label=area)
        if panel.held_out and any(one.accuracy is not None for one in run.evaluations):
            _draw_held_out(axes, run, _look(colour, len(panel.lines), len(runs)))


def _look(colour: str, line: int, num_runs: int) -> dict[str, Any]:
    """Return colour and line style of a panel's line."""
    if num_runs == 1:
        return {"color": COLOURS[line % len(COLOURS)]}
    return {"color": colour, "linestyle": DASHES[line % len(DASHES)]}


def _draw_held_out(axes: Axes, run: RunRecords, look: dict[str, Any]) -> None:
    """Draw the accuracy of evaluations in a band of its standard error."""
    evaluations = [one for one in run.evaluations if one.accuracy is not None]
    steps = [e.step for e in evaluations]
    mean = [e.mean for e in evaluations]
    low = [e.mean - e.standard_error for e in evaluations]
    high = [e.mean + e.standard_error for e in evaluations]
    samples = evaluations[-1].samples_per_problem
    label = f"held-out avg@{samples} \u00b1 standard error"
    axes.plot(steps, mean, marker="o", markersize=5, label=label, **look)
    axes.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    for what, style, values in (
        ("pass", ":", [e.best_of_all for e in evaluations]),
        ("cons", "-.", [e.consensus for e in evaluations]),
    ):
        known = [value for value in values if value is not None]
        if samples > 1 and len(known) == len(steps):
            label = f"held-out {what}@{samples}"
            axes.plot(steps, known, label=label, **look | {"linestyle": style, "alpha": 0.7})
    for number, name in enumerate(evaluations[-1].sets):
        own = [(e.step, e.sets[name]["accuracy"]) for e in evaluations if name in e.sets]
        axes.plot(
            *zip(*own, strict=True),
            **(look | {"marker": "sv^D<>pX"[number % 8]}),
            alpha=0.5,
            label=f"held-out {name}",
        )


def _draw_against(axes: Axes, panel: Panel, run: RunRecords, colour: str) -> None:
    """Draw a metric against another, one point a step, the last one marked."""
    [name] = panel.lines
    axes.set_xlabel(panel.unit.rpartition("against ")[2])
    x_values, y_values = run.series(panel.against), run.series(name)
    steps = sorted(x_values.keys() & y_values.keys())
    x, y = [x_values[step] for step in steps], [y_values[step] for step in steps]
    axes.plot(x, y, color=colour, alpha=0.6, linewidth=1.0, marker=".", label="each step")
    axes.plot(x[-1:], y[-1:], color=colour, marker="o", linestyle="none", label="the last step")
