"""A panel of curves: the metrics that share its axes, and how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megadapo.observe.metrics.names import METRICS

HELD_OUT = "eval/accuracy"
"""Name that stands for held-out evaluations among measured metrics."""


@dataclass(frozen=True)
class Panel:
    """Metrics that share two axes."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Label of each metric, in the order that they are drawn."""
    rest_of: str = field(default="", kw_only=True)
    """Pattern of metrics that users name, such as the parts of a reward; all are lines, whose
    labels are the pattern's group."""
    band: tuple[str, ...] = field(default=(), kw_only=True)
    """Two metrics with a filled area between them, the higher one first; a label may follow."""
    log: bool = field(default=False, kw_only=True)
    """Whether the vertical axis is logarithmic."""
    held_out: bool = field(default=False, kw_only=True)
    """Whether held-out evaluations are drawn too."""
    bound: str = field(default="", kw_only=True)
    """Key of the oracle whose bound the report draws."""
    against: str = field(default="", kw_only=True)
    """Metric of the horizontal axis; empty for the step."""
    in_plot: bool = field(default=False, kw_only=True)
    """Whether plot.png has the panel; the report has every panel."""

    def with_values(self, names: Collection[str]) -> Panel | None:
        """Return the panel with only the lines that have values; None without any.

        Args:
            names: the metrics that have values; `HELD_OUT` if there are evaluations.
        """
        lines = {name: label for name, label in self.lines.items() if name in names}
        if self.rest_of:
            found = (re.fullmatch(self.rest_of, name) for name in names if name not in METRICS)
            lines |= {match[0]: match[1].replace("_", " ") for match in found if match}
        is_empty = not lines or (self.against and self.against not in names)
        if is_empty and not (self.held_out and HELD_OUT in names):
            return None
        return replace(self, lines=lines)


Section: TypeAlias = tuple[str, tuple[Panel, ...]]
"""A heading and its panels."""
