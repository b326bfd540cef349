"""One PNG that shows whether a run is healthy; several runs are drawn over each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.errors import DataError
from megadapo.observe.plot_panels import PANELS, PlottedRun

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

    runs = [PlottedRun.read(folder) for folder in folders]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17.5, 11.0), layout="constrained")
        panels = list(figure.subplots(3, 4).flat)
        for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
            for panel, draw in zip(panels, PANELS, strict=True):
                draw(panel, run, colour)
        for panel in panels:
            finish(panel)
        figure.suptitle(_title(runs), fontsize=13)
        if len(runs) > 1:
            _name_runs(figure, runs)
        save(figure, output)
    return output


def finish(axes: Axes) -> None:
    """Give a panel its axes and legend, or say that nothing of it was measured."""
    from matplotlib.ticker import MaxNLocator

    if not axes.get_xlabel():
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


def _title(runs: Sequence[PlottedRun]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    last = runs[0].records[-1]["step"]
    return f"{runs[0].name}: {last} step{'s' if last != 1 else ''}"


def _name_runs(figure: Figure, runs: Sequence[PlottedRun]) -> None:
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
