"""The saved responses of runs: an index of every group that is shown, and the groups compressed.

The groups may be far more than a page can hold. They are read once, one at a time; when the page's
share is full, the step with the most groups loses its last one, so that every step stays. If one
group of each step is too much, only every second step keeps its own, then every fourth.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megadapo.codec import encode
from megadapo.observe.rollouts.files import read_rollouts
from megadapo.observe.rollouts.saved_group import (
    SavedGroup,
    SavedResponse,
    conversation,
    environment_of,
)
from megadapo.observe.run_records import RunRecords

MAX_BYTES = 40 * 2**20
"""Compressed responses of one page, in base64."""

_EXCERPT = 160
# The page shows fewer digits of a log-prob; more would not compress.
_DIGITS = 5


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


class SavedRun:
    """Counts and distributions of one run's saved groups, shown or not; the groups are not kept."""

    def __init__(self) -> None:
        self.files: dict[Path, int] = {}
        """Files that were read, and when each last changed."""
        self.num_groups = 0
        self.num_responses = 0
        self._lengths: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._groups: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)

    def add(self, step: int, lengths: Sequence[int], correct: Sequence[bool] | None) -> None:
        """Count one group's responses: their lengths in tokens, and which are correct."""
        self.num_groups += 1
        self.num_responses += len(lengths)
        self._lengths[step].update(lengths)
        if correct:
            self._groups[step][sum(correct), len(correct)] += 1

    def length(self) -> HeatMap | None:
        """Return responses by length in tokens; None without any."""
        if not self.num_responses:
            return None
        longest = max((max(counter, default=0) for counter in self._lengths.values()), default=0)
        needed = math.ceil((longest + 1) / MAX_LENGTH_ROWS)
        # the next of 1, 2, 5, 10, 20, 50 ...
        scale = int(10 ** math.floor(math.log10(max(needed, 1))))
        width = next(scale * unit for unit in (1, 2, 5, 10) if scale * unit >= needed)
        num_rows = longest // width + 1
        rows: dict[int, Counter[int]] = {}
        for step, counter in self._lengths.items():
            rows[step] = Counter()
            for length, count in counter.items():
                rows[step][length // width] += count
        return _heat(rows, [float(width * row) for row in range(num_rows + 1)])

    def accuracy(self) -> HeatMap | None:
        """Return groups by the share of their responses that is right; None if that is unknown."""
        if not self._groups:
            return None
        sizes = [size for counter in self._groups.values() for _, size in counter]
        top = min(max(sizes, default=1), MAX_ACCURACY_ROWS - 1)
        rows: dict[int, Counter[int]] = {}
        for step, counter in self._groups.items():
            rows[step] = Counter()
            for (right, size), count in counter.items():
                rows[step][round(right / size * top)] += count
        # a row stands for one share, so its bounds lie half a share to each side
        return _heat(rows, [(row - 0.5) / top for row in range(top + 2)])


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


@dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """One line of the list of groups."""

    run: int
    step: int
    prompt_index: int
    disposition: str
    from_reserve: bool
    prompt_id: str
    excerpt: str
    """Beginning of the prompt's last message."""
    correct: list[bool | None]
    reward: float
    """Mean reward of its responses."""
    truncated: list[bool]
    disagreed: list[bool]
    """Whether rule and symbolic comparison differ, per response."""


class SavedResponses:
    """The saved groups that a page shows: up to a number of bytes, spread evenly over the steps."""

    def __init__(self, max_bytes: int) -> None:
        self.runs: list[SavedRun] = []
        """Counts of all groups, by run."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._steps: defaultdict[tuple[int, int], list[tuple[GroupEntry, str]]] = defaultdict(list)
        self._places: dict[tuple[int, int], int] = {}
        """Place of each step among all steps."""
        self._stride = 1
        """Steps at its multiples keep groups."""

    def add(self, entry: GroupEntry, chunk: str) -> None:
        step = entry.run, entry.step
        if self._places.setdefault(step, len(self._places)) % self._stride:
            return
        self._steps[step].append((entry, chunk))
        self._num_bytes += len(chunk)
        while self._num_bytes > self._max_bytes:
            fullest = max(self._steps, key=lambda step: len(self._steps[step]))
            if len(self._steps[fullest]) > 1 or len(self._steps) == 1:
                self._num_bytes -= len(self._steps[fullest].pop()[1])
                continue
            self._stride *= 2
            for left_out in [step for step in self._steps if self._places[step] % self._stride]:
                self._num_bytes -= sum(len(chunk) for _, chunk in self._steps.pop(left_out))

    def contents(self) -> tuple[list[GroupEntry], list[str]]:
        """Return the shown groups by run, step and order: entries, and base64 of gzip of JSON."""
        kept = [pair for step in sorted(self._steps) for pair in self._steps[step]]
        return [entry for entry, _ in kept], [chunk for _, chunk in kept]


def read_responses(
    folders: Sequence[Path], *, max_bytes: int = MAX_BYTES, known: SavedResponses | None = None
) -> SavedResponses:
    """Read the saved responses of run folders, of which at most `max_bytes` are kept.

    `known`: result of an earlier call, to which the groups of new files are added.

    Raises DataError for a damaged file, of which `known` may have a part then.
    """
    present = [RunRecords(folder).group_files() for folder in folders]
    saved = known or SavedResponses(max_bytes)
    saved.runs = saved.runs or [SavedRun() for _ in folders]
    pairs = list(zip(saved.runs, present, strict=True))
    if any(not counts.files.items() <= files.items() for counts, files in pairs):
        # a resumed run repeats steps
        return read_responses(folders, max_bytes=max_bytes)
    for run, (counts, files) in enumerate(pairs):
        for path in [path for path in files if path not in counts.files]:
            for group in read_rollouts(path):
                entry = _entry(run, group)
                if group.disposition != "held_out":
                    counts.add(entry.step, group.group.lengths, group.group.correct)
                saved.add(entry, _packed(group))
        counts.files = files
    return saved


def _packed(group: SavedGroup) -> str:
    """Return what the page shows of a group: base64 of gzip of JSON."""
    shown: dict[str, object] = {
        "prompt": encode(group.prompt),
        "responses": [_shown_response(response) for response in group.responses],
        "control_tokens": group.control_tokens,
    }
    plain = json.dumps(shown, separators=(",", ":"), allow_nan=False).encode("ascii")
    return base64.b64encode(gzip.compress(plain, compresslevel=6, mtime=0)).decode("ascii")


def _entry(run: int, group: SavedGroup) -> GroupEntry:
    messages = group.prompt.messages
    return GroupEntry(
        run=run,
        step=group.step,
        prompt_index=group.prompt_index,
        disposition=group.disposition,
        from_reserve=group.from_reserve,
        prompt_id=group.prompt.id,
        excerpt=messages[-1][1][:_EXCERPT] if messages else "",
        correct=[saved.score.correct for saved in group.responses],
        reward=math.fsum(group.group.rewards) / max(1, len(group.responses)),
        truncated=[saved.response.truncated for saved in group.responses],
        disagreed=[saved.disagreed for saved in group.responses],
    )


def _shown_response(saved: SavedResponse) -> dict[str, object]:
    shown: dict[str, object] = encode(saved, readable=True)
    del shown["experts"]
    parts = list(conversation(saved.response)) if saved.response.turns else []
    return shown | {
        "environment": environment_of(saved),
        "conversation": [
            (one.start, one.end, one.turn and [one.turn.reward, one.turn.seconds]) for one in parts
        ],
        "logprobs_rollout": _rounded(saved.response.logprobs),
        "logprobs_old": _rounded(saved.logprobs_old),
        "logprobs_update": _rounded(saved.logprobs_update),
        "advantages": _rounded(saved.advantages),
    }


def _rounded(values: np.ndarray | None) -> list[float | None] | None:
    if values is None:
        return None
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in values.tolist()]
