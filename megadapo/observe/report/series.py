"""The curves of a run, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.observe.metrics.records import MetricRecord

MAX_POINTS = 2000
"""Points of one curve: more than a chart has pixels across."""

_NOT_CURVES = ("step", "policy_version", "eval/accuracy", "eval/policy_version")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps at which it was measured."""

    steps: list[int]
    values: list[float | None]
    """None where the value was not finite."""
    num_measured: int
    """Steps before thinning."""
    num_not_finite: int


def read_series(
    records: Sequence[MetricRecord], *, max_points: int = MAX_POINTS
) -> dict[str, Series]:
    """Return every metric that was measured at least once, by name in the order of the records."""
    names = dict.fromkeys(name for record in records for name in record)
    curves = {}
    for name in names:
        points = [
            (int(record["step"] or 0), float(value))
            for record in records
            if isinstance(value := record.get(name), int | float)
        ]
        if points and name not in _NOT_CURVES:
            curves[name] = _series(points, max_points)
    return curves


def _series(points: list[tuple[int, float]], max_points: int) -> Series:
    kept = _thin(points, max_points)
    return Series(
        steps=[step for step, _ in kept],
        values=[value if math.isfinite(value) else None for _, value in kept],
        num_measured=len(points),
        num_not_finite=sum(not math.isfinite(value) for _, value in points),
    )


def _thin(points: list[tuple[int, float]], max_points: int) -> list[tuple[int, float]]:
    """Keep the lowest and the highest point of equal stretches, so that no spike is lost."""
    if len(points) <= max_points:
        return points
    width = math.ceil(2 * len(points) / max_points)
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if not finite:
            kept.append(stretch[0])
            continue
        ends = {min(finite, key=_value), max(finite, key=_value)}
        kept.extend(sorted(ends))
    return kept


def _value(point: tuple[int, float]) -> float:
    return point[1]
