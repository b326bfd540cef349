"""What became of each bound of `[oracles]` over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.oracles import BOUNDED, is_within

Status = Literal["held", "broken", "no bound", "not measured"]

MAX_CELLS = 120
"""Pieces of the strip that shows an oracle over the steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One oracle over a whole run."""

    key: str
    """Key of `[oracles]`."""
    metric: str
    bound: float | None
    worst: str
    """The worst value as text, as it may be nan."""
    worst_step: int | None
    status: Status
    cells: list[int]
    """Stretches of steps, oldest first: 1 held, 0 broken, -1 not measured or not bounded."""
    meaning: str


def judge(records: Sequence[MetricRecord], bounds: Mapping[str, object]) -> list[Verdict]:
    """Hold the steps of a run against the `oracles` of its configuration."""
    verdicts = [
        _judge_metric(records, _bound(bounds.get(key)), key, metric, meaning)
        for key, metric, meaning in BOUNDED
    ]
    limit = _bound(bounds.get("max_skipped_steps"))
    return [*verdicts, _judge_skipped(records, limit)]


def _bound(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _judge_metric(
    records: Sequence[MetricRecord], bound: float | None, key: str, metric: str, meaning: str
) -> Verdict:
    measured = [r for r in records if r.get(metric) is not None]
    worst = max(measured, key=lambda r: _badness(r[metric]), default=None)
    states = [
        -1 if bound is None or r.get(metric) is None else int(is_within(r, metric, bound))
        for r in records
    ]
    return Verdict(
        key=key,
        metric=metric,
        bound=bound,
        worst="-" if worst is None else f"{worst[metric]:.3g}".replace("e-0", "e-"),
        worst_step=int(worst["step"] or 0) if worst is not None and worst[metric] else None,
        status=_status(bound, states),
        cells=_cells(states),
        meaning=meaning,
    )


def _badness(value: float | None) -> tuple[bool, float]:
    """Order values so that one that is not a number is worse than any."""
    assert value is not None
    return (True, 0.0) if math.isnan(value) else (False, value)


def _judge_skipped(records: Sequence[MetricRecord], limit: float | None) -> Verdict:
    streak, longest, worst_step = 0, 0, None
    states = []
    for record in records:
        skipped = record.get("policy/skipped_updates")
        streak = streak + 1 if skipped else 0
        if streak > longest:
            longest, worst_step = streak, int(record["step"] or 0)
        states.append(-1 if limit is None or skipped is None else int(streak < limit))
    measured = any(r.get("policy/skipped_updates") is not None for r in records)
    return Verdict(
        key="max_skipped_steps",
        metric="policy/skipped_updates",
        bound=limit,
        worst=f"{longest} in a row" if measured else "-",
        worst_step=worst_step,
        status=_status(limit, states),
        cells=_cells(states),
        meaning="updates were skipped because the loss or its gradient was not finite",
    )


def _status(bound: float | None, states: Sequence[int]) -> Status:
    if bound is None:
        return "no bound"
    if 0 in states:
        return "broken"
    return "held" if 1 in states else "not measured"


def _cells(states: list[int]) -> list[int]:
    """Return stretches of steps; one broken step breaks its stretch."""
    num_cells = min(len(states), MAX_CELLS)
    edges = [round(i * len(states) / num_cells) for i in range(num_cells + 1)] if states else []
    cells = []
    for start, end in zip(edges, edges[1:], strict=False):
        stretch = states[start:end]
        cells.append(0 if 0 in stretch else max(stretch))
    return cells
