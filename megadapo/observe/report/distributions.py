"""How response lengths and group accuracies are spread over the steps of a run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
    """[column][row]"""


class Distributions:
    """Counts what the saved groups of one run are like, without keeping them."""

    def __init__(self) -> None:
        self._lengths: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._groups: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)

    def add(self, step: int, lengths: Sequence[int], correct: Sequence[bool]) -> None:
        """Count one group's responses: their lengths in tokens, and which were right."""
        self._lengths[step].update(lengths)
        if correct:
            self._groups[step][sum(correct), len(correct)] += 1

    def length(self) -> HeatMap:
        """Return responses by length in tokens."""
        longest = max((max(counter, default=0) for counter in self._lengths.values()), default=0)
        width = _nice(math.ceil((longest + 1) / MAX_LENGTH_ROWS))
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


def _nice(width: int) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50 ..."""
    scale = int(10 ** math.floor(math.log10(max(width, 1))))
    return next(scale * unit for unit in (1, 2, 5, 10) if scale * unit >= width)


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
