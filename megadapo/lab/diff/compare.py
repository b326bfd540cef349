"""The comparison of two runs, step by step and phase by phase, and its result as text.

Causes come before effects.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megadapo.errors import DataError
from megadapo.lab.diff.difference import Difference, Phase, Row, differing_rows, row
from megadapo.lab.diff.groups import StepGroups
from megadapo.observe.metrics.names import is_repeated
from megadapo.observe.metrics.records import MetricRecord, has_rollouts
from megadapo.observe.oracles import FIRST_RATIO
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.observe.tables import TextTable, count, printable, ranges
from megadapo.rollout.journal.record_log import read_records
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, decode_record, describe_difference
from megadapo.run.state.checkpoint import checkpoints_of
from megadapo.run.state.resume import changed_keys, decides_learning


def about_schedules(folder_a: Path, folder_b: Path) -> str:
    """Return sentences about where the schedules of A and B part; empty if one has none."""
    paths = [folder / SCHEDULE_FILE for folder in (folder_a, folder_b)]
    if not all(path.is_file() for path in paths):
        return ""
    (a, damage_a), (b, damage_b) = map(_payloads, paths)
    damage = "".join(
        f" {path}: record {len(payloads)} is not whole ({problem}), and no later one is compared."
        for path, payloads, problem in zip(paths, (a, b), (damage_a, damage_b), strict=True)
        if problem
    )
    if a and b and a[0] != b[0]:
        parts = "The schedules have other rules: data, rewards, seed, sampling or rollout keys."
        return parts + damage
    for one, two in zip(a[1:], b[1:], strict=False):
        if one != two:
            found = describe_difference(decode_record(one), decode_record(two), "A", "B")
            return f"The schedules part at {found}.{damage}"
    num_common = max(0, min(len(a), len(b)) - 1)
    agree = f"The schedules agree in {num_common} takes and publications, with all their tokens."
    return agree + damage


def _payloads(path: Path) -> tuple[list[bytes], str]:
    """Return the intact records of a file, and what is wrong after them."""
    found: list[bytes] = []
    try:
        problem = read_records(path, lambda offset, payload: found.append(payload))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return found, problem


_PHASES: tuple[tuple[Phase, tuple[str, ...]], ...] = (
    (
        "rollout",
        ("response_length/", "degenerate/", "tokens/generated", "tokens/recomputed", "tools/"),
    ),
    ("rollout", ("environment/",)),
    ("rollout", ("staleness/token_share", "staleness/mean", "staleness/max")),
    ("score", ("reward/", "accuracy/")),
    ("selection", ("groups/", "tokens/trained", "reflection/")),
    ("old log-probs", ("parity/", "staleness/", "kl/mean", "kl/max", "critic/value_mean")),
)
"""Phase and prefixes of the metrics that it makes; all others are of the update."""
_CAUSES = ("policy/lr", "critic/lr", "kl/coef", "policy/skipped_updates", "critic/skipped_updates")
"""Metrics of the update that explain the others."""
_NEWS = (
    "step",
    "eval/accuracy",
    "eval/score",
    "eval/pass_at_k",
    "eval/cons_at_k",
    "eval/response_length",
    "eval/policy_version",
)
"""Metrics of an evaluation that became known in the step, which depends on its speed: the
evaluations themselves are compared."""
_MEANINGS = {
    "skipped_updates": ("One run skipped an update for a loss or gradient that was not finite.",),
    "lr": ("The learning rate of the step differs.",),
}
_SAMPLED = "tokens/generated"
SHOWN = 6
"""Most metrics in a table."""


def compare_metrics(step: int, a: MetricRecord, b: MetricRecord) -> dict[str, Difference]:
    """Return the differing metrics by phase.

    The key "causes" has the metrics of the update that explain its others.
    """
    names = [
        name
        for name in {**a, **b}
        if is_repeated(name) and name not in _NEWS and not re.match("held_out/.+/accuracy$", name)
    ]
    if is_replay(a) != is_replay(b):
        names.remove(_SAMPLED)
    if a.get(FIRST_RATIO) is None or b.get(FIRST_RATIO) is None:
        # GPUs measure it in steps that save a checkpoint, and these may differ
        names = [name for name in names if name != FIRST_RATIO]
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name in names:
        key: str = "causes" if name in _CAUSES else _phase(name)
        found.setdefault(key, []).append((name, a.get(name), b.get(name)))
    differences: dict[str, Difference] = {}
    for key, values in found.items():
        if rows := differing_rows(values):
            left = len(rows) - SHOWN
            more = (f"{left} more metrics of the phase differ.",) if left > 0 else ()
            differences[key] = Difference(
                step=step,
                phase=_phase(rows[0][0]),
                field=rows[0][0],
                rows=rows[:SHOWN],
                evidence=(*_MEANINGS.get(rows[0][0].rpartition("/")[2], ()), *more),
            )
    return differences


def is_replay(record: MetricRecord) -> bool:
    """Return whether the step trained on saved rollouts."""
    return record.get(_SAMPLED) is None and record.get("groups/kept") is not None


def _phase(name: str) -> Phase:
    if name.startswith(("eval/", "held_out/")):
        return "evaluation"
    if name.startswith("environment/") and name.endswith("/return"):
        return "score"
    return next((phase for phase, names in _PHASES if name.startswith(names)), "update")


_DEPENDS_ON_WEIGHTS = {
    "token": "the noise, or the publication of the weights",
    "engine log-prob": "the publication of the weights, or the engines",
    "old log-prob": "the trainer's batch, or its computation",
}
"""Values that depend on the weights of the step before, and what else could be the cause."""


@dataclass(frozen=True)
class ComparedRun(RunRecords):
    """The records of one of the two runs, by step."""

    name: str
    """"A" or "B" in texts."""

    @cached_property
    def metrics(self) -> dict[int, MetricRecord]:
        return {int(record["step"] or 0): record for record in self.steps}

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of complete checkpoints by step."""
        return checkpoints_of(self.folder)

    def groups_of(self, step: int) -> dict[int, SavedGroup] | None:
        """Return the saved groups of a step by prompt index; None if none were saved."""
        if step not in self.saved_steps:
            return None
        return {group.prompt_index: group for group in self.groups(step)}

    @property
    def saved_groups(self) -> object:
        """The value of observe.saved_groups; None if it is not known."""
        return self.config.get("observe", {}).get("saved_groups")

    def has_all_groups(self, step: int, groups: dict[int, SavedGroup]) -> bool:
        """Return whether every group that the step generated or trained on is among `groups`."""
        kept = self.metrics[step].get("groups/kept")
        num_trained = sum(group.disposition == "trained" for group in groups.values())
        return self.saved_groups == "all" and kept == num_trained

    @property
    def groups_per_mini_batch(self) -> int | None:
        """Planned number of groups of an update, if each group is in one update of a step."""
        algorithm, sampling = self.config.get("algorithm", {}), self.config.get("sampling", {})
        if algorithm.get("passes") != 1 or "responses_per_prompt" not in sampling:
            return None
        return int(algorithm["responses_per_mini_batch"]) // int(sampling["responses_per_prompt"])


def compare_runs(folder_a: Path, folder_b: Path) -> RunComparison:
    """Compare two runs up to the first step in which they differ."""
    comparison = RunComparison(ComparedRun(folder_a, "A"), ComparedRun(folder_b, "B"))
    comparison.compare()
    return comparison


@dataclass
class RunComparison:
    """The comparison of two runs, and its result."""

    a: ComparedRun
    b: ComparedRun
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
            "a": str(self.a.folder),
            "b": str(self.b.folder),
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

    def compare(self) -> None:
        """Compare step by step; stop at the first difference."""
        for run in (self.a, self.b):
            run.need_steps()
        for key, values in changed_keys(self.a.config, self.b.config).items():
            keys = self.learning_keys if decides_learning(key) else self.other_keys
            keys.append(row(key, *values))
        for step in self._steps():
            # a phase that is reported in two ways counts once, by its first
            found: dict[Phase, Difference] = {}
            for one in self._step(step):
                found.setdefault(one.phase, one)
            if found:
                first, *self.also = found.values()
                about = [*self._about_weights(first)]
                if first.phase == "update":
                    of_weights = (one.evidence for one in self.also if one.phase == "weights")
                    about += next(of_weights, ())[1:]
                about.append(about_schedules(self.a.folder, self.b.folder))
                self.first = first.with_evidence(*about)
                break
            if step:
                self.equal_steps.append(step)

    def _steps(self) -> list[int]:
        """Return the steps to compare: 0 for an evaluation before training, then all records."""
        steps = sorted(self.a.metrics.keys() | self.b.metrics.keys())
        first = max(min(run.metrics, default=0) for run in (self.a, self.b))
        skipped = [step for step in steps if step < first]
        if skipped:
            # a run that resumed from another run's checkpoint
            text = f"steps {ranges(skipped)}: only one run has them"
            self.notes.append(text)
        return [*([] if skipped else [0]), *(step for step in steps if step >= first)]

    def _step(self, step: int) -> Iterator[Difference]:
        """Yield the first difference of each phase of a step."""
        metrics: dict[str, Difference] = {}
        if step:
            a, b = (run.metrics.get(step) for run in (self.a, self.b))
            if a is None or b is None:
                ends = (max(run.metrics, default=0) for run in (self.a, self.b))
                text = (
                    f"{'A' if a is None else 'B'} has no record of the step: it ended before, or "
                    "has not come so far."
                )
                rows = (row("last step", *ends),)
                yield Difference(
                    step=step, phase="record", field="step", rows=rows, evidence=(text,)
                )
                return
            if is_replay(a) != is_replay(b):
                self._gap("tokens/generated: one run is a replay, which has none", step)
            metrics = compare_metrics(step, a, b)
            yield from self._phases(step, metrics)
        yield from self._weights(step)
        if "evaluation" in metrics:
            yield metrics["evaluation"]
        yield from self._evaluation(step)

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
        pairs = [(run, run.groups_of(step)) for run in (self.a, self.b)]
        for run, groups in pairs:
            if not has_rollouts(run.metrics[step]):
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
            samples = has_rollouts(self.a.metrics[step])
            return "No groups of both runs are saved." if samples else ""
        common = len(groups.a.keys() & groups.b.keys())
        if groups.is_complete:
            return f"Prompts, tokens and scores of all {common} groups were compared one by one."
        return f"Only the {common} groups that both runs saved were compared one by one."

    def _weights(self, step: int) -> Iterator[Difference]:
        a, b = (run.checkpoints.get(step) for run in (self.a, self.b))
        if a is None or b is None:
            lacking = [run.name for run, path in ((self.a, a), (self.b, b)) if path is None]
            if step:
                keys = "checkpoint.every = 1, and checkpoint.keep = run.num_steps keeps all"
                names = " and ".join(lacking)
                self._gap(f"weights: no checkpoint of the step in {names} ({keys})", step)
            return
        # torch is needed only here
        from megadapo.lab.diff.weights import compare_checkpoints

        before = [run.checkpoints.get(step - 1) for run in (self.a, self.b)]
        yield from compare_checkpoints(step, (a, b), (before[0], before[1]))

    def _evaluation(self, step: int) -> Iterator[Difference]:
        a, b = (
            next((one for one in run.evaluations if one.step == step), None)
            for run in (self.a, self.b)
        )
        if (a is None) != (b is None):
            self._gap(f"the evaluation: only {'A' if b is None else 'B'} has one", step)
        if a is None or b is None:
            return
        one, two = (dict(leaves(asdict(record), "/")) for record in (a, b))
        if rows := differing_rows((name, one.get(name), two.get(name)) for name in {**one, **two}):
            text = "Answers of an evaluation are not saved, so the problem is not known."
            yield Difference(
                step=step, phase="evaluation", field=rows[0][0], rows=rows[:SHOWN], evidence=(text,)
            )

    def _about_weights(self, first: Difference) -> Iterator[str]:
        """Yield whether the weights were equal that the differing value depends on."""
        suspect = _DEPENDS_ON_WEIGHTS.get(first.field)
        if suspect is None or (first.field == "token" and first.token != 1):
            return  # log-probs before the token show that the engines had the same weights
        before = first.step - 1
        if before == 0:
            yield f"No step came before: suspect the initial weights, or {suspect}."
        elif all(before in run.checkpoints for run in (self.a, self.b)):
            yield f"The checkpoints of step {before} are equal: suspect {suspect}."
        else:
            yield f"The weights of step {before} were not compared: suspect them, or {suspect}."

    def _gap(self, reason: str, step: int) -> None:
        self.gaps.setdefault(reason, []).append(step)


WIDTH = 100


def text_of_comparison(result: RunComparison) -> str:
    """Return the whole result: settings, the first difference, and what was not compared."""
    parts = [f"A  {result.a.folder}\nB  {result.b.folder}"]
    for title, rows in (
        ("Settings that decide what is learned differ:", result.learning_keys),
        ("Other settings differ:", result.other_keys),
    ):
        if rows:
            parts.append(f"{title}\n{_table(rows)}")
    first, steps = result.first, result.equal_steps
    equal = f"{count(len(steps), 'step')} ({ranges(steps)})"
    if first is None:
        parts.append(f"The runs are equal in {equal}.")
    else:
        lines = [f"The runs part in step {first.step}, {first.phase}: {first.place}."]
        parts.append("\n".join([*lines, *textwrap.wrap(" ".join(first.evidence), WIDTH)]))
        if first.rows:
            parts.append(_table(first.rows))
        if result.also:
            also = [f"{one.phase}: {one.place}" for one in result.also]
            parts.append("\n".join([f"Also in step {first.step}:", *_list(also)]))
        if steps:
            parts.append(f"Equal before: {equal}.")
    gaps = [f"step{'s' * (len(s) > 1)} {ranges(s)}: {reason}" for reason, s in result.gaps.items()]
    if gaps or result.notes:
        parts.append("\n".join(["Not compared:", *_list([*gaps, *result.notes])]))
    return printable("\n\n".join(parts))


def _list(lines: Sequence[str]) -> list[str]:
    return [
        textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines
    ]


def _table(rows: Sequence[Row]) -> str:
    return textwrap.indent(TextTable(head=("", "A", "B"), rows=rows).text(), "  ")
