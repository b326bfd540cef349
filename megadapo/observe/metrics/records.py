"""The metrics of a run: `metrics.jsonl` (one object per step), `evaluations.jsonl`, other writers.

A line is on the disk before `record` returns. A kill can tear at most the last line, which is
dropped on the next open; `rewind` sets aside the steps after the one that a run resumes from.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from megadapo.errors import DataError
from megadapo.observe.config import WriterName
from megadapo.observe.files import append_line, complete_lines, replace_text
from megadapo.observe.metrics.names import METRIC_NAMES, OWN_AREAS
from megadapo.observe.metrics.writers import MetricWriter, close_in_time, open_writer

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ASIDE_FOLDER = "aside"
"""Folder of the records of steps that a run has repeated."""

MetricRecord = dict[str, int | float | None]

# JSON has no such numbers, and null would hide that a loss was not finite.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One held-out evaluation."""

    step: int
    """Last finished rollout step; 0 is before training."""
    policy_version: int
    accuracy: float | None
    """Mean over problems of the share of right samples (avg@k); None if no reward function says
    what is right."""
    standard_error: float
    """Standard error over problems, of the accuracy or else of the score."""
    num_problems: int
    samples_per_problem: int
    response_length: float
    """Mean response length in tokens."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """pass@k: probability that one of k samples is right, by k as text; the last k is all."""
    consensus: float | None = None
    """cons@k: share of problems whose most frequent answer is right; None without answers."""

    score: float | None = None
    """Mean reward; None in records without it."""

    sets: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Values of each named held-out set, by the names above; those are the means over the sets.
    `best_of_all` is pass@k of all samples."""

    @property
    def best_of_all(self) -> float | None:
        """pass@k of all samples; None in records without it."""
        return self.pass_at.get(str(self.samples_per_problem))

    @property
    def mean(self) -> float:
        """The accuracy, or else the score."""
        return mean_of(vars(self))

    @property
    def measure(self) -> str:
        """Name of `mean`."""
        return measure_of(vars(self))


def measure_of(values: Mapping[str, Any]) -> str:
    """Return what an evaluation, or one of its sets, measures: accuracy or score."""
    return "score" if values["accuracy"] is None else "accuracy"


def mean_of(values: Mapping[str, Any]) -> float:
    """Return the mean over problems of what an evaluation or set measures."""
    mean: float = values[measure_of(values)]
    return mean


class MetricsLog:
    """The metrics of a run folder, open for appending. Use as a context manager, or `close` it."""

    def __init__(
        self,
        folder: Path,
        *,
        writers: Sequence[WriterName] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files of a folder; create the folder if it is missing.

        Args:
            writers: writers that `open_writers` opens.
            config: the run's configuration as JSON values, for writers that show it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._steps = folder / METRICS_FILE
        self._evaluations = folder / EVALUATIONS_FILE
        self._writer_names = writers
        self._config = {} if config is None else config
        self._writers: list[MetricWriter] = []
        self._purge_step: int | None = None
        for path in (self._steps, self._evaluations):
            _rewrite(path, lambda entry: True)
        records = read_metrics(folder)
        last_step = records[-1]["step"] if records else -1
        assert last_step is not None, "every record has its step"
        self._last_step = int(last_step)

    def record(self, values: Mapping[str, int | float | None]) -> MetricRecord:
        """Write one step with every metric name (null if missing) and the run's own names."""
        own = [name for name in values if name not in METRIC_NAMES]
        unknown = [name for name in own if not name.startswith(OWN_AREAS)]
        assert not unknown, f"not in METRIC_NAMES: {unknown}"
        names = (*METRIC_NAMES, *own)
        record: MetricRecord = {name: _number(values.get(name)) for name in names}
        step = record["step"]
        assert isinstance(step, int), "a record needs its step"
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        append_line(self._steps, _line(record))
        self._last_step = step
        for writer in self._writers:
            writer.write(record, step)
        return record

    def record_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Write one evaluation; it replaces an evaluation of the same step."""
        _rewrite(self._evaluations, lambda entry: entry["step"] != evaluation.step)
        entry = _number(asdict(evaluation))
        if not evaluation.sets:
            del entry["sets"]
        append_line(self._evaluations, _line(entry))

    def rewind(self, step: int) -> None:
        """Move everything recorded after `step`, which a resumed run repeats, to `ASIDE_FOLDER`."""
        for path in (self._steps, self._evaluations):
            later = [entry for entry in _read(path) if entry["step"] > step]
            if later:
                aside = self._folder / ASIDE_FOLDER / path.name
                aside.parent.mkdir(exist_ok=True)
                append_line(aside, "".join(map(_line, later)))
                _rewrite(path, lambda entry: entry["step"] <= step)
        self.close()
        self._purge_step = step + 1
        self._last_step = min(self._last_step, step)

    def open_writers(self) -> None:
        """Open the writers; call it after `rewind`."""
        for name in self._writer_names:
            writer = open_writer(name, self._folder, self._config, self._purge_step)
            self._writers.append(writer)

    def close(self) -> None:
        """Close the writers within a time; the JSON lines are always complete."""
        writers, self._writers = self._writers, []
        for writer in writers:
            close_in_time(writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(folder: Path, *, last_bytes: int | None = None) -> list[MetricRecord]:
    """Return the steps of a run, oldest first, without an incomplete last line.

    `last_bytes`: size of the end of the file to read; None reads all steps.
    """
    return _read(folder / METRICS_FILE, last_bytes)


def read_evaluations(folder: Path) -> list[EvaluationRecord]:
    """Return the evaluations of a run, oldest first, without an incomplete last line."""
    path = folder / EVALUATIONS_FILE
    try:
        return [EvaluationRecord(**entry) for entry in _read(path)]
    except TypeError as error:
        raise DataError(f"{path}: not an evaluation of this version: {error}") from error


def has_rollouts(record: MetricRecord) -> bool:
    """Return whether the step had rollouts; without any it trained on rows of data."""
    of_rows = ("tokens/trained", "pairs/accuracy")
    return record.get("groups/kept") is not None or all(
        record.get(name) is None for name in of_rows
    )


def _number(value: object) -> Any:
    """Return a plain int, float or None, also for numpy scalars; a table of them as a table."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    if isinstance(value, numbers.Integral):
        return int(value)
    assert isinstance(value, numbers.Real), f"a metric must be a number, not {value!r}"
    return float(value)


def plain_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as JSON can hold them, with "nan", "inf" and "-inf" as text."""
    return {
        key: plain_numbers(value)
        if isinstance(value, dict)
        else str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in entry.items()
    }


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(plain_numbers(entry), allow_nan=False) + "\n"


def _read(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(complete_lines(path, last_bytes=last_bytes), start=1):
        if not line:
            continue
        try:
            entry = json.loads(line, object_hook=_as_numbers)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise DataError(f"{path}, line {number}: not an object with a step")
        entries.append(entry)
    return entries


def _as_numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the values that `plain_numbers` wrote."""
    return {
        key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in entry.items()
    }


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some entries, by replacing the file atomically."""
    if not path.exists():
        return
    content = "".join(_line(entry) for entry in _read(path) if keep(entry))
    if content.encode() != path.read_bytes():
        replace_text(path, content)
