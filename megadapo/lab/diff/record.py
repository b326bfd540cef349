"""The recorded results of one run, step by step, as the comparison reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megadapo.config.recipe import RESOLVED_FILE
from megadapo.errors import ConfigError
from megadapo.observe.metrics.records import (
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    has_rollouts,
    read_evaluations,
    read_metrics,
)
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, saved_steps
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.run.state.checkpoint_store import CHECKPOINTS, step_folders, step_of
from megadapo.weights.disk.sources import read_json

SAVED_GROUPS = ("observe", "saved_groups")


@dataclass(frozen=True)
class RunRecord:
    """The files of one run folder."""

    folder: Path
    name: str
    """"A" or "B" in texts."""

    def check(self) -> None:
        """Raise ConfigError if the folder has no finished step."""
        if not self.metrics:
            raise ConfigError(
                f"{self.folder} is not the folder of a run with a finished step: {METRICS_FILE} is "
                "missing or empty"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty if the file is missing."""
        path = self.folder / RESOLVED_FILE
        return read_json(path) if path.is_file() else {}

    @cached_property
    def metrics(self) -> dict[int, MetricRecord]:
        """The records of the steps, by step."""
        records = read_metrics(self.folder)
        return {int(record["step"] or 0): record for record in records}

    @cached_property
    def evaluations(self) -> dict[int, EvaluationRecord]:
        """The held-out evaluations by step; step 0 is before training."""
        return {evaluation.step: evaluation for evaluation in read_evaluations(self.folder)}

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of complete checkpoints by step."""
        return {step_of(path): path for path in step_folders(self.folder / CHECKPOINTS)}

    @cached_property
    def _saved_steps(self) -> frozenset[int]:
        return frozenset(saved_steps(self.folder))

    def groups(self, step: int) -> dict[int, SavedGroup] | None:
        """Return the saved groups of a step by prompt index; None if none were saved."""
        if step not in self._saved_steps:
            return None
        return {
            group.prompt_index: group for group in read_rollouts(rollouts_path(self.folder, step))
        }

    @property
    def saved_groups(self) -> object:
        """The value of observe.saved_groups; None if it is not known."""
        section, key = SAVED_GROUPS
        return self.config.get(section, {}).get(key)

    def has_all_groups(self, step: int, groups: dict[int, SavedGroup]) -> bool:
        """Return whether every group that the step generated or trained on is among `groups`."""
        kept = self.metrics[step].get("groups/kept")
        num_trained = sum(group.disposition == "trained" for group in groups.values())
        return self.saved_groups == "all" and kept == num_trained

    def samples(self, step: int) -> bool:
        """Return whether the step has rollouts, instead of training on rows of data."""
        return has_rollouts(self.metrics[step])

    @property
    def groups_per_mini_batch(self) -> int | None:
        """Planned number of groups of an update, if each group is in one update of a step."""
        algorithm, sampling = self.config.get("algorithm", {}), self.config.get("sampling", {})
        if algorithm.get("passes") != 1 or "responses_per_prompt" not in sampling:
            return None
        return int(algorithm["responses_per_mini_batch"]) // int(sampling["responses_per_prompt"])
