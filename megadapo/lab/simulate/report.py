"""Report of a simulation: a table, a picture, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.lab.record import write_record
from megadapo.lab.simulate.fit import RunFit
from megadapo.lab.simulate.simulation import Assumptions, PolicyResult
from megadapo.lab.simulate.task import LogNormalLengths
from megadapo.observe.plot import COLOURS, STYLE, save
from megadapo.observe.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "rounds-3x"
"""Name of the policy whose time is the unit of the column `x`."""
CAPTION = f"""\
seconds: until a batch is full; +-: standard error; x: multiples of {BASELINE}; gen.: tokens
generated per token trained; used: share of mixed groups' tokens trained on; bias: of the mean
length; staleness: mean/largest, in weight publications; slots: share in use"""


def results_table(results: Sequence[PolicyResult], title: str) -> str:
    """Return a table with one row per policy."""
    baseline = next(one.seconds_per_batch for one in results if one.name == BASELINE)
    rows = [
        [
            one.name,
            f"{one.seconds_per_batch:,.1f}",
            "" if one.seconds_error is None else f"{one.seconds_error / one.seconds_per_batch:.0%}",
            f"{one.seconds_per_batch / baseline:.2f}",
            f"{one.generated_per_trained:.2f}",
            f"{one.kept_tokens_trained:.0%}",
            f"{one.length_bias:+.1%}",
            f"{one.staleness_mean:.2f}/{one.staleness_max}",
            f"{one.slot_use:.0%}",
        ]
        for one in results
    ]
    head = ["policy", "seconds", "+-", "x", "gen.", "used", "bias", "staleness", "slots"]
    return TextTable(title=title, note=CAPTION, head=head, rows=rows).text()


def fit_table(fit: RunFit) -> str:
    """Return measured and predicted rollout times, one row per step."""
    rows = [
        [str(step), f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured:.2f}"]
        for step, measured, predicted in zip(fit.steps, fit.measured, fit.predicted, strict=True)
    ]
    for number, row in enumerate(rows):
        row.append("fitted" if number < fit.num_fitted else "predicted")
    title = (
        f"rollout: speed fitted to {fit.num_fitted} steps, "
        f"{len(fit.steps) - fit.num_fitted} predicted"
    )
    head = ["step", "measured s", "predicted s", "ratio", ""]
    return TextTable(title=title, head=head, rows=rows).text()


def write_json(results: Sequence[PolicyResult], assumptions: Assumptions, path: Path) -> None:
    """Write the assumptions and, under "policies", one object per policy.

    Raises:
        DataError: the file cannot be written.
    """
    task = dict(vars(assumptions.task))
    lengths = task.pop("lengths")
    # measured lengths are not listed
    task["lengths"] = asdict(lengths) if isinstance(lengths, LogNormalLengths) else "measured"
    document = {
        "engines": asdict(assumptions.engines),
        "task": task,
        "policies": [asdict(one) for one in results],
    }
    write_record(path, document)


def draw(results: Sequence[PolicyResult], title: str, output: Path) -> None:
    """Draw the policies side by side into a PNG.

    Raises:
        DataError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 1.8 + 0.7 * len(results)), layout="constrained")
        panels = list(figure.subplots(2, 2, sharey=True).flat)
        for panel, (name, value, label) in zip(panels, _PANELS, strict=True):
            _bars(panel, results, name, value, label)
        figure.suptitle(title, fontsize=13)
        save(figure, output)


def _bars(
    axes: Axes,
    results: Sequence[PolicyResult],
    name: str,
    value: Callable[[PolicyResult], float],
    label: str,
) -> None:
    values = [value(one) for one in results]
    bars = axes.barh([one.name for one in results], values, color=COLOURS[0])
    axes.bar_label(bars, labels=[label.format(number) for number in values], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_title(name)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


_PANELS: tuple[tuple[str, Callable[[PolicyResult], float], str], ...] = (
    ("Seconds to a full batch", lambda one: one.seconds_per_batch, "{:,.0f}"),
    ("Tokens generated per token trained", lambda one: one.generated_per_trained, "{:.2f}"),
    ("Length bias (%)", lambda one: 100.0 * one.length_bias, "{:+.1f}"),
    ("Staleness, mean (weight publications)", lambda one: one.staleness_mean, "{:.2f}"),
)
