"""A metric, and the panel that draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """The name of a metric, and how its numbers are summed."""

    name: str
    label: str = ""
    """Label of its line in the panel."""
    per: str = field(default="", kw_only=True)
    """Count that the trainer divides the metric's sum by. Both are summed over micro-batches, ranks
    and the updates of a step. Empty: the number is measured once a step."""
    is_max: bool = field(default=False, kw_only=True)
    """Whether the metric is the maximum over all of these, measured if the count is not 0."""
    counted: bool = field(default=False, kw_only=True)
    """Whether the sampler counts it from 0 in each step."""


@dataclass(frozen=True, eq=False)
class Panel:
    """Metrics that share two axes, in plot.png and report.html."""

    heading: str
    """Heading over this panel and its neighbours; empty if the metrics have no curves of their own:
    the report draws the phases of a step on top of each other."""
    title: str
    unit: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)
    """Label of each metric that has values, in the order that they are drawn."""
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
