"""The curves of an ablation: each row's mean over its seeds, in a band of its standard error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megadapo.lab.ablation.measures import (
    RunRecords,
    Spread,
    share_trained_without_signal,
    share_without_signal,
)
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.plot import COLOURS, STYLE, finish, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Dash = Literal["-", "--", ":", "-."]
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")

Points = Iterator[tuple[int, float | None]]
"""Step and value of a run."""


def _of(value: Callable[[MetricRecord], float | None]) -> Callable[[RunRecords], Points]:
    return lambda run: ((int(record["step"] or 0), value(record)) for record in run.steps)


def _metric(name: str) -> Callable[[RunRecords], Points]:
    return _of(lambda record: record.get(name))


def _held_out(run: RunRecords) -> Points:
    return ((evaluation.step, evaluation.accuracy) for evaluation in run.evaluations)


PANELS: tuple[tuple[str, Callable[[RunRecords], Points]], ...] = (
    ("Held-out accuracy", _held_out),
    ("Training accuracy", _metric("accuracy/mean")),
    ("Entropy (nats per token)", _metric("policy/entropy")),
    ("Response length (tokens)", _metric("response_length/mean")),
    ("Sampled groups without signal (share)", _of(share_without_signal)),
    ("Trained groups without signal (share)", _of(share_trained_without_signal)),
    ("Clipped above (fraction of tokens)", _metric("policy/clip_high_fraction")),
    ("Token probability", _metric("policy/token_probability_mean")),
)


def draw_rows(rows: Sequence[tuple[str, Sequence[Path]]], title: str, output: Path) -> None:
    """Draw rows over each other into a PNG.

    Args:
        rows: name of each and the folders of its runs; one without runs is left out.

    Raises:
        DataError: a folder holds a damaged file, or the picture cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    read = [(name, [RunRecords.read(folder) for folder in runs]) for name, runs in rows if runs]
    coloured = list(zip(read, itertools.cycle(COLOURS), strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17.5, 7.5), layout="constrained")
        for axes, (panel, points) in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
            axes.set_title(panel)
            for place, ((_, runs), colour) in enumerate(coloured):
                _band(axes, [points(run) for run in runs], colour, _dash(place))
            finish(axes)
        figure.suptitle(title, fontsize=13)
        handles = [
            Line2D([], [], color=colour, linestyle=_dash(place), label=name)
            for place, ((name, _), colour) in enumerate(coloured)
        ]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        save(figure, output)


def _dash(place: int) -> Dash:
    """More rows than colours differ in their lines."""
    return _DASHES[place // len(COLOURS) % len(_DASHES)]


def _band(axes: Axes, runs: Sequence[Points], colour: str, dash: Dash) -> None:
    by_step: dict[int, list[float | None]] = {}
    for points in runs:
        for step, value in points:
            known = value is not None and math.isfinite(value)
            by_step.setdefault(step, []).append(value if known else None)
    spreads = [(step, spread) for step in sorted(by_step) if (spread := Spread.of(by_step[step]))]
    if not spreads:
        return
    steps = [step for step, _ in spreads]
    means = [spread.mean for _, spread in spreads]
    errors = [spread.standard_error or 0.0 for _, spread in spreads]
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    marker = "o" if len(steps) < 3 else None
    axes.plot(steps, means, color=colour, linestyle=dash, marker=marker, label="mean")
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
