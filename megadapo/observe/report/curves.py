"""Curves of a run, and distributions of response length and group accuracy over its steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.panels.sections import NOT_CURVES, PHASES

MAX_COLUMNS = 240
MAX_LENGTH_ROWS = 40
MAX_ACCURACY_ROWS = 17


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Counts over stretches of steps (columns) and classes of a value (rows, lowest first)."""

    columns: list[tuple[int, int]]
    """First and last saved step of each column."""
    edges: list[float]
    """Bounds of the rows, one more than there are rows."""
    counts: list[list[int]]
    """Counts by column, then row."""


class Distributions:
    """Counts of lengths and accuracies of one run's saved groups; the groups are not kept."""

    def __init__(self) -> None:
        self._lengths: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._groups: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)

    def add(self, step: int, lengths: Sequence[int], correct: Sequence[bool]) -> None:
        """Count one group's responses: their lengths in tokens, and which are correct."""
        self._lengths[step].update(lengths)
        if correct:
            self._groups[step][sum(correct), len(correct)] += 1

    def length(self) -> HeatMap:
        """Return responses by length in tokens."""
        longest = max((max(counter, default=0) for counter in self._lengths.values()), default=0)
        needed = math.ceil((longest + 1) / MAX_LENGTH_ROWS)
        # the next of 1, 2, 5, 10, 20, 50 ...
        scale = int(10 ** math.floor(math.log10(max(needed, 1))))
        width = next(scale * unit for unit in (1, 2, 5, 10) if scale * unit >= needed)
        num_rows = longest // width + 1
        rows = {step: _rows(counter, width) for step, counter in self._lengths.items()}
        return _heat(rows, [float(width * row) for row in range(num_rows + 1)])

    def accuracy(self) -> HeatMap:
        """Return groups by the share of their responses that is right."""
        sizes = [size for counter in self._groups.values() for _, size in counter]
        top = min(max(sizes, default=1), MAX_ACCURACY_ROWS - 1)
        rows: dict[int, Counter[int]] = {}
        for step, counter in self._groups.items():
            rows[step] = Counter()
            for (right, size), count in counter.items():
                rows[step][round(right / size * top)] += count
        # a row stands for one share, so its bounds lie half a share to each side
        return _heat(rows, [(row - 0.5) / top for row in range(top + 2)])


def _rows(lengths: Counter[int], width: int) -> Counter[int]:
    rows: Counter[int] = Counter()
    for length, count in lengths.items():
        rows[length // width] += count
    return rows


def _heat(rows: dict[int, Counter[int]], edges: list[float]) -> HeatMap:
    steps = sorted(rows)
    per_column = math.ceil(len(steps) / MAX_COLUMNS) or 1
    columns, counts = [], []
    for start in range(0, len(steps), per_column):
        stretch = steps[start : start + per_column]
        total = sum((rows[step] for step in stretch), Counter[int]())
        columns.append((stretch[0], stretch[-1]))
        counts.append([total[row] for row in range(len(edges) - 1)])
    return HeatMap(columns=columns, edges=edges, counts=counts)


MAX_POINTS = 2000
"""Points of one curve: more than a chart has pixels across."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps at which it was measured."""

    steps: list[int]
    values: list[float | None]
    """Values; None if not finite."""
    num_measured: int
    """Steps before thinning."""
    num_not_finite: int


def read_series(
    records: Sequence[MetricRecord], *, max_points: int = MAX_POINTS
) -> dict[str, Series]:
    """Return every metric that was measured at least once, by name in the order of the records."""
    names = dict.fromkeys(name for record in records for name in record)
    # drawn on top of each other: each curve needs a value at every step of the others
    stacked = {"time/step_s", *(name for part in PHASES.values() for name in part)}
    common = _steps_of_all(records, stacked, max_points)
    curves = {}
    for name in names:
        points = [
            (int(record["step"] or 0), float(value))
            for record in records
            if isinstance(value := record.get(name), int | float)
        ]
        if points and name not in NOT_CURVES:
            at_common = [point for point in points if point[0] in common]
            kept = at_common if name in stacked else _thin(points, max_points)
            curves[name] = Series(
                steps=[step for step, _ in kept],
                values=[value if math.isfinite(value) else None for _, value in kept],
                num_measured=len(points),
                num_not_finite=sum(not math.isfinite(value) for _, value in points),
            )
    return curves


def _steps_of_all(records: Sequence[MetricRecord], names: set[str], max_points: int) -> set[int]:
    """Return the steps that the sum of some metrics keeps, so the same ones for all of them."""
    sums = []
    for record in records:
        found = [value for name in names if (value := record.get(name)) is not None]
        sums.append((int(record["step"] or 0), sum(filter(math.isfinite, found))))
    return {step for step, _ in _thin(sums, max_points)}


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
        ends = {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
        kept.extend(sorted(ends))
    return kept
