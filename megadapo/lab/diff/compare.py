"""The comparison of two runs, step by step and phase by phase: causes come before effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.lab.diff.difference import Difference, Phase, Row, ranges, row
from megadapo.lab.diff.groups import StepGroups
from megadapo.lab.diff.metrics import compare_evaluations, compare_metrics, is_replay
from megadapo.lab.diff.record import RunRecord
from megadapo.lab.diff.schedules import about_schedules
from megadapo.run.state.config_diff import changed_keys, decides_learning

_DEPENDS_ON_WEIGHTS = {
    "token": "the noise, or the publication of the weights",
    "engine log-prob": "the publication of the weights, or the engines",
    "old log-prob": "the trainer's batch, or its computation",
}
"""Values that depend on the weights of the step before, and what else could be the cause."""


@dataclass
class RunComparison:
    """The result of comparing two runs."""

    a: Path
    b: Path
    learning_keys: list[Row] = field(default_factory=list)
    """Differing keys that decide what is learned."""
    other_keys: list[Row] = field(default_factory=list)
    first: Difference | None = None
    also: list[Difference] = field(default_factory=list)
    """First differences of the later phases of the same step."""
    equal_steps: list[int] = field(default_factory=list)
    """Steps without a difference, before the first one."""
    gaps: dict[str, list[int]] = field(default_factory=dict)
    """Reasons why something was not compared, with their steps."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        keys = {"learning": self.learning_keys, "other": self.other_keys}
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.first is None,
            "config": {
                name: [{"key": key, "a": a, "b": b} for key, a, b in rows]
                for name, rows in keys.items()
            },
            "first": None if self.first is None else self.first.to_json(),
            "also": [one.to_json() for one in self.also],
            "equal_steps": self.equal_steps,
            "not_compared": [
                {"reason": reason, "steps": steps} for reason, steps in self.gaps.items()
            ],
            "notes": self.notes,
        }


def compare_runs(folder_a: Path, folder_b: Path) -> RunComparison:
    """Compare two runs up to the first step in which they differ."""
    return _Comparer(RunRecord(folder_a, "A"), RunRecord(folder_b, "B")).compare()


def _about_update(also: Sequence[Difference]) -> tuple[str, ...]:
    """Return what the weights say about an update that differs."""
    weights = next((one for one in also if one.phase == "weights"), None)
    return () if weights is None else weights.evidence[1:]


class _Comparer:
    """The comparison in progress."""

    def __init__(self, a: RunRecord, b: RunRecord) -> None:
        self._a, self._b = a, b
        self._result = RunComparison(a.folder, b.folder)

    def compare(self) -> RunComparison:
        """Compare step by step; stop at the first difference."""
        result = self._result
        for run in (self._a, self._b):
            run.check()
        changed = changed_keys(self._a.config, self._b.config)
        for key, values in changed.items():
            keys = result.learning_keys if decides_learning(key) else result.other_keys
            keys.append(row(key, *values))
        for step in self._steps():
            # a phase that is reported in two ways counts once, by its first
            found: dict[Phase, Difference] = {}
            for one in self._step(step):
                found.setdefault(one.phase, one)
            if found:
                first, *result.also = found.values()
                more = _about_update(result.also) if first.phase == "update" else ()
                schedules = about_schedules(self._a.folder, self._b.folder)
                about = (*self._about_weights(first), *more, *filter(None, [schedules]))
                result.first = first.with_evidence(*about)
                break
            if step:
                result.equal_steps.append(step)
        return result

    def _steps(self) -> list[int]:
        """Return the steps to compare: 0 for an evaluation before training, then all records."""
        steps = sorted(self._a.metrics.keys() | self._b.metrics.keys())
        first = max(min(run.metrics, default=0) for run in (self._a, self._b))
        skipped = [step for step in steps if step < first]
        if skipped:
            # a run that resumed from another run's checkpoint
            text = f"steps {ranges(skipped)}: only one run has them"
            self._result.notes.append(text)
        return [*([] if skipped else [0]), *(step for step in steps if step >= first)]

    def _step(self, step: int) -> Iterator[Difference]:
        """Yield the first difference of each phase of a step."""
        metrics: dict[str, Difference] = {}
        if step:
            a, b = (run.metrics.get(step) for run in (self._a, self._b))
            if a is None or b is None:
                yield self._missing(step)
                return
            if is_replay(a) != is_replay(b):
                self._gap("tokens/generated: one run is a replay, which has none", step)
            metrics = compare_metrics(step, a, b)
            yield from self._phases(step, metrics)
        yield from self._weights(step)
        if "evaluation" in metrics:
            yield metrics["evaluation"]
        yield from self._evaluation(step)

    def _missing(self, step: int) -> Difference:
        runs = (self._a, self._b)
        rows = (row("last step", *(max(run.metrics, default=0) for run in runs)),)
        name = next(run.name for run in runs if step not in run.metrics)
        text = f"{name} has no record of the step: it ended before, or has not come so far."
        return Difference(step=step, phase="record", field="step", rows=rows, evidence=(text,))

    def _phases(self, step: int, metrics: Mapping[str, Difference]) -> Iterator[Difference]:
        """Yield the differences of the saved groups and of the metrics up to the update."""
        groups = self._groups(step)

        def of_groups(*phases: Phase) -> Iterator[Difference]:
            found = (groups.first(phase) for phase in phases if groups is not None)
            return (one for one in found if one is not None)

        def of_metrics(*keys: str) -> Iterator[Difference]:
            for key in keys:
                if key in metrics:
                    yield metrics[key].with_evidence(self._about_groups(step, groups))

        # a metric is over all groups, so a group shows the place better, and comes first
        yield from of_groups("rollout", "score", "selection")
        yield from of_metrics("rollout", "score", "selection")
        yield from of_groups("advantages", "old log-probs")
        yield from of_metrics("old log-probs", "causes")
        yield from of_groups("update")
        yield from of_metrics("update")

    def _groups(self, step: int) -> StepGroups | None:
        """Return the saved groups of both runs, and note the ones that are missing."""
        pairs = [(run, run.groups(step)) for run in (self._a, self._b)]
        for run, groups in pairs:
            if not run.samples(step):
                return None
            key = f'observe.saved_groups = {run.saved_groups}; "all" saves every group'
            if groups is None:
                self._gap(f"groups: {run.name} saved none ({key})", step)
            elif not run.has_all_groups(step, groups):
                self._gap(f"the other groups: {run.name} saved {len(groups)} ({key})", step)
        (run_a, a), (run_b, b) = pairs
        if a is None or b is None:
            return None
        complete = run_a.has_all_groups(step, a) and run_b.has_all_groups(step, b)
        sizes = {run.groups_per_mini_batch for run in (run_a, run_b)}
        size = sizes.pop() if len(sizes) == 1 else None
        return StepGroups(step, a, b, complete, size)

    def _about_groups(self, step: int, groups: StepGroups | None) -> str:
        if groups is None:
            return "" if not self._a.samples(step) else "No groups of both runs are saved."
        common = len(groups.a.keys() & groups.b.keys())
        if groups.is_complete:
            return f"Prompts, tokens and scores of all {common} groups were compared one by one."
        return f"Only the {common} groups that both runs saved were compared one by one."

    def _weights(self, step: int) -> Iterator[Difference]:
        a, b = (run.checkpoints.get(step) for run in (self._a, self._b))
        if a is None or b is None:
            lacking = [run.name for run, path in ((self._a, a), (self._b, b)) if path is None]
            if step:
                keys = "checkpoint.every = 1, and checkpoint.keep = run.num_steps keeps all"
                names = " and ".join(lacking)
                self._gap(f"weights: no checkpoint of the step in {names} ({keys})", step)
            return
        # torch is needed only here
        from megadapo.lab.diff.weights import compare_checkpoints

        before = [run.checkpoints.get(step - 1) for run in (self._a, self._b)]
        yield from compare_checkpoints(step, (a, b), (before[0], before[1]))

    def _evaluation(self, step: int) -> Iterator[Difference]:
        one, two = (run.evaluations.get(step) for run in (self._a, self._b))
        if (one is None) != (two is None):
            self._gap(f"the evaluation: only {'A' if two is None else 'B'} has one", step)
        return compare_evaluations(step, one, two)

    def _about_weights(self, first: Difference) -> Iterator[str]:
        """Yield whether the weights were equal that the differing value depends on."""
        suspect = _DEPENDS_ON_WEIGHTS.get(first.field)
        if suspect is None or (first.field == "token" and first.token != 1):
            return  # log-probs before the token show that the engines had the same weights
        before = first.step - 1
        if before == 0:
            yield f"No step came before: suspect the initial weights, or {suspect}."
        elif all(before in run.checkpoints for run in (self._a, self._b)):
            yield f"The checkpoints of step {before} are equal: suspect {suspect}."
        else:
            yield f"The weights of step {before} were not compared: suspect them, or {suspect}."

    def _gap(self, reason: str, step: int) -> None:
        self._result.gaps.setdefault(reason, []).append(step)
