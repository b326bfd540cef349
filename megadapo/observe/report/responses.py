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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megadapo.observe.report.curves import Distributions, HeatMap
from megadapo.observe.rollouts.conversation import conversation, environment_of
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse, encode_saved_response
from megadapo.observe.run_records import RunRecords

MAX_BYTES = 40 * 2**20
"""Compressed responses of one page, in base64."""

_EXCERPT = 160
# The page shows fewer digits of a log-prob; more would not compress.
_DIGITS = 5


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
    correct: list[bool]
    truncated: list[bool]
    disagreed: list[bool]
    """Whether rule and symbolic comparison differ, per response."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """Counts and distributions of one run's saved groups, shown or not."""

    num_groups: int
    num_responses: int
    num_shown: int
    length: HeatMap | None
    accuracy: HeatMap | None


@dataclass(frozen=True, kw_only=True)
class SavedResponses:
    """The groups that a page shows, by run, step and order; chunks[i] is group entries[i]."""

    runs: list[SavedRun]
    entries: list[GroupEntry]
    chunks: list[str]
    """base64 of gzip of JSON."""


def read_responses(folders: Sequence[Path], *, max_bytes: int = MAX_BYTES) -> SavedResponses:
    """Read the saved responses of run folders, of which at most `max_bytes` are kept.

    Raises DataError for a damaged file.
    """
    kept = _GroupsWithinBytes(max_bytes)
    totals = []
    for run, folder in enumerate(folders):
        counts, num_groups, num_responses = Distributions(), 0, 0
        for group in RunRecords(folder).all_groups():
            entry = _entry(run, group)
            lengths = [len(saved.response.token_ids) for saved in group.responses]
            counts.add(entry.step, lengths, entry.correct)
            shown: dict[str, object] = {
                "prompt": group.prompt.to_json(),
                "responses": [_shown_response(response) for response in group.responses],
                "control_tokens": group.control_tokens,
            }
            plain = json.dumps(shown, separators=(",", ":"), allow_nan=False).encode("ascii")
            packed = gzip.compress(plain, compresslevel=6, mtime=0)
            kept.add(entry, base64.b64encode(packed).decode("ascii"))
            num_groups += 1
            num_responses += len(lengths)
        totals.append((counts, num_groups, num_responses))
    entries, chunks = kept.contents()
    runs = [
        SavedRun(
            num_groups=num_groups,
            num_responses=num_responses,
            num_shown=sum(entry.run == run for entry in entries),
            length=counts.length() if num_responses else None,
            accuracy=counts.accuracy() if num_responses else None,
        )
        for run, (counts, num_groups, num_responses) in enumerate(totals)
    ]
    return SavedResponses(runs=runs, entries=entries, chunks=chunks)


class _GroupsWithinBytes:
    """Groups up to a number of bytes, spread evenly over the steps."""

    def __init__(self, max_bytes: int) -> None:
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
            else:
                self._leave_out_every_second_step()

    def _leave_out_every_second_step(self) -> None:
        self._stride *= 2
        for step in [step for step in self._steps if self._places[step] % self._stride]:
            self._num_bytes -= sum(len(chunk) for _, chunk in self._steps.pop(step))

    def contents(self) -> tuple[list[GroupEntry], list[str]]:
        kept = [pair for step in sorted(self._steps) for pair in self._steps[step]]
        return [entry for entry, _ in kept], [chunk for _, chunk in kept]


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
        truncated=[saved.response.truncated for saved in group.responses],
        disagreed=[saved.disagreed for saved in group.responses],
    )


def _shown_response(saved: SavedResponse) -> dict[str, object]:
    shown = encode_saved_response(saved)
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
