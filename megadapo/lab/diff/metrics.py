"""Differences between the metrics and evaluations of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megadapo.lab.diff.difference import Difference, Phase, differing_rows
from megadapo.observe.metrics.names import is_repeated
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord
from megadapo.observe.oracles import FIRST_RATIO

_PHASES: tuple[tuple[Phase, tuple[str, ...]], ...] = (
    ("rollout", ("response_length/", "tokens/generated", "tokens/recomputed", "tools/")),
    ("rollout", ("environment/",)),
    ("rollout", ("staleness/token_share", "staleness/mean", "staleness/max")),
    ("score", ("reward/", "accuracy/")),
    ("selection", ("groups/", "tokens/trained", "reflection/")),
    ("old log-probs", ("parity/", "staleness/", "kl/mean", "kl/max", "critic/value_mean")),
)
"""Phase and prefixes of the metrics that it makes; all others are of the update."""
_CAUSES = ("policy/lr", "critic/lr", "kl/coef", "policy/skipped_updates", "critic/skipped_updates")
"""Metrics of the update that explain the others."""
_NEWS = ("step", "eval/accuracy", "eval/pass_at_k", "eval/cons_at_k", "eval/policy_version")
"""Metrics of an evaluation that became known in the step, which depends on its speed: the
evaluations themselves are compared."""
_HELD_OUT = ("held_out/", "/accuracy")
_SAMPLED = "tokens/generated"
SHOWN = 6
"""Most metrics in a table."""


def compare_metrics(step: int, a: MetricRecord, b: MetricRecord) -> dict[str, Difference]:
    """Return the differing metrics by phase.

    The key "causes" has the metrics of the update that explain its others.
    """
    names = [name for name in {**a, **b} if is_repeated(name) and not _is_news(name)]
    if is_replay(a) != is_replay(b):
        names.remove(_SAMPLED)
    if a.get(FIRST_RATIO) is None or b.get(FIRST_RATIO) is None:
        # GPUs measure it in steps that save a checkpoint, and these may differ
        names = [name for name in names if name != FIRST_RATIO]
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name in names:
        found.setdefault(_key(name), []).append((name, a.get(name), b.get(name)))
    differences = {}
    for key, values in found.items():
        if rows := differing_rows(values):
            left = len(rows) - SHOWN
            more = (f"{left} more metrics of the phase differ.",) if left > 0 else ()
            differences[key] = Difference(
                step=step,
                phase=_phase(rows[0][0]),
                field=rows[0][0],
                rows=rows[:SHOWN],
                evidence=(*_meaning(rows[0][0]), *more),
            )
    return differences


def compare_evaluations(
    step: int, a: EvaluationRecord | None, b: EvaluationRecord | None
) -> Iterator[Difference]:
    """Yield the difference between the evaluations of a step."""
    if a is None or b is None:
        return
    one, two = (dict(_flat(asdict(record))) for record in (a, b))
    if rows := differing_rows((name, one.get(name), two.get(name)) for name in {**one, **two}):
        text = "Answers of an evaluation are not saved, so the problem is not known."
        yield Difference(
            step=step, phase="evaluation", field=rows[0][0], rows=rows[:SHOWN], evidence=(text,)
        )


def is_replay(record: MetricRecord) -> bool:
    """Return whether the step trained on saved rollouts."""
    return record.get(_SAMPLED) is None and record.get("groups/kept") is not None


def _is_news(name: str) -> bool:
    start, end = _HELD_OUT
    return name in _NEWS or (name.startswith(start) and name.endswith(end))


def _key(name: str) -> str:
    return "causes" if name in _CAUSES else _phase(name)


def _phase(name: str) -> Phase:
    if name.startswith(("eval/", "held_out/")):
        return "evaluation"
    if name.startswith("environment/") and name.endswith("/return"):
        return "score"
    return next((phase for phase, names in _PHASES if name.startswith(names)), "update")


def _meaning(name: str) -> tuple[str, ...]:
    if name.endswith("/skipped_updates"):
        return ("One run skipped an update for a loss or gradient that was not finite.",)
    if name.endswith("/lr"):
        return ("The learning rate of the step differs.",)
    return ()


def _flat(values: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{start}{name}/")
        else:
            yield f"{start}{name}", value
