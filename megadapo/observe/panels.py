"""Panels of curves under their headings, for plot.png and report.html."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from megadapo.observe.metrics.names import DECLARED, METRICS
from megadapo.observe.metrics.panel import Panel

HELD_OUT = "evaluations"
"""Name that stands for held-out evaluations among measured metrics."""

Section: TypeAlias = tuple[str, tuple[Panel, ...]]
"""A heading and its panels."""

PANELS = [
    replace(panel, lines={metric.name: metric.label for metric in metrics})
    for panel, metrics in DECLARED.items()
]
_OF_STEP = {panel.title: panel.lines for panel in PANELS if not panel.heading}

PHASES = {part: _OF_STEP[part] for part in ("in_step", "between", "beside")}
"""Phases that the report draws on top of each other: of a step, between steps, in parallel."""

NOT_CURVES = _OF_STEP["numbers"].keys() - {panel.against for panel in PANELS}
"""Names in a record that no panel shows."""


def sections_with_values(names: Collection[str]) -> list[Section]:
    """Return the headings and panels that have values.

    A metric that no panel names, such as one of another version, gets its own panel at the end.

    Args:
        names: the metrics that have values; `HELD_OUT` if there are evaluations.
    """
    drawn = [shown for panel in PANELS if (shown := _with_values(panel, names)) is not None]
    found = [
        (heading, tuple(panels))
        for heading, panels in groupby(drawn, lambda panel: panel.heading)
        if heading
    ]
    known = {HELD_OUT, *(name for panel in drawn for name in panel.lines)}
    others = tuple(
        Panel("Other metrics", name, lines={name: name}) for name in names if name not in known
    )
    return [*found, ("Other metrics", others)] if others else found


def _with_values(panel: Panel, names: Collection[str]) -> Panel | None:
    """Return the panel with only the lines that have values; None without any."""
    lines = {name: label for name, label in panel.lines.items() if name in names}
    if panel.rest_of:
        found = (re.fullmatch(panel.rest_of, name) for name in names if name not in METRICS)
        lines |= {match[0]: match[1].replace("_", " ") for match in found if match}
    is_empty = not lines or (panel.against and panel.against not in names)
    if is_empty and not (panel.held_out and HELD_OUT in names):
        return None
    return replace(panel, lines=lines)
