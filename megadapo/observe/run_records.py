"""The records in a run's folder, as plots, reports and comparisons read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megadapo.errors import DataError
from megadapo.models.folder import read_json
from megadapo.observe.files import complete_lines
from megadapo.observe.metrics.records import (
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    read_evaluations,
    read_metrics,
)
from megadapo.observe.rollouts.files import (
    HELD_OUT_FOLDER,
    ROLLOUTS_FOLDER,
    read_rollouts,
    saved_steps,
    step_file,
)
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.run_warnings import run_warnings
from megadapo.observe.tables import ranges

LOG_FILE = "log.txt"
RESOLVED_FILE = "config.json"
"""The resolved configuration in a run's folder."""
MODEL_FOLDER = "model"
"""Folder of the trained model's configuration and tokenizer, without which there is no export."""


def leaves(
    table: Mapping[str, Any], separator: str = ".", start: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a nested table, joined from the outermost one on, and their values."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, separator, f"{start}{name}{separator}")
        else:
            yield f"{start}{name}", value


@dataclass(frozen=True)
class RunRecords:
    """The files of one run folder; each is read when it is first needed.

    Every field raises DataError for a damaged file.
    """

    folder: Path
    last_bytes: int | None = field(default=None, kw_only=True)
    """Size of the end of metrics.jsonl and log.txt to read; None reads all of them."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty if the file is missing."""
        path = self.folder / RESOLVED_FILE
        return read_json(path) if path.exists() else {}

    @cached_property
    def steps(self) -> list[MetricRecord]:
        """The metrics of the finished steps, oldest first."""
        return read_metrics(self.folder, last_bytes=self.last_bytes)

    def need_steps(self) -> list[MetricRecord]:
        """Return the metrics of the finished steps; raise DataError without any."""
        if not self.steps:
            raise DataError(
                f"{self.folder}: no steps are recorded in {METRICS_FILE}; is this a run folder?"
            )
        return self.steps

    @cached_property
    def evaluations(self) -> list[EvaluationRecord]:
        """The held-out evaluations, oldest first; step 0 is before training."""
        return read_evaluations(self.folder)

    @cached_property
    def warnings(self) -> list[str]:
        """Warnings about what the run learns."""
        return run_warnings(self.steps, self.evaluations)

    def series(self, name: str) -> dict[int, float]:
        """Return the values of a metric by the steps at which it was measured."""
        return {
            int(record["step"] or 0): float(value)
            for record in self.steps
            if (value := record.get(name)) is not None
        }

    @cached_property
    def saved_steps(self) -> list[int]:
        """The steps with saved groups, ascending."""
        return saved_steps(self.folder)

    def step_with_groups(self, step: int | None = None, folder: str = ROLLOUTS_FOLDER) -> int:
        """Return a step if its groups are saved, by default the last one with saved groups.

        Raises DataError if none are saved.
        """
        steps = saved_steps(self.folder, folder)
        if not steps:
            raise DataError(
                f"{self.folder} has no saved groups ({folder}/step-N.jsonl.zst); "
                "observe.saved_groups is the number of groups that a run saves per step, or "
                '"all" for whole batches'
            )
        if step is not None and step not in steps:
            raise DataError(
                f"{self.folder} has no saved groups of step {step}, only of steps {ranges(steps)}"
            )
        return steps[-1] if step is None else step

    def groups(self, step: int, folder: str = ROLLOUTS_FOLDER) -> Iterator[SavedGroup]:
        """Yield the saved groups of a step, by prompt index."""
        return read_rollouts(step_file(self.folder / folder, step))

    def group_files(self) -> dict[Path, int]:
        """Return the files of groups by step, also held-out ones, and when each last changed."""
        folders = (ROLLOUTS_FOLDER, HELD_OUT_FOLDER)
        places = [(step, one) for one in folders for step in saved_steps(self.folder, one)]
        paths = (step_file(self.folder / folder, step) for step, folder in sorted(places))
        return {path: path.stat().st_mtime_ns for path in paths}

    @cached_property
    def log_lines(self) -> list[str]:
        """The complete lines of log.txt, oldest first."""
        lines = complete_lines(self.folder / LOG_FILE, last_bytes=self.last_bytes)
        return [line.decode(errors="replace") for line in lines]
