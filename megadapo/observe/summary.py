"""The summary of a run: a table of before and after, its costs, its files, and next commands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megadapo.errors import DataError
from megadapo.observe.metrics.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    read_evaluations,
    read_metrics,
)
from megadapo.observe.metrics.writers import TENSORBOARD_FOLDER
from megadapo.observe.progress import LOG_FILE

_ROWS = (
    ("training accuracy", "accuracy/mean", "{:.3f}"),
    ("reward", "reward/mean", "{:+.3f}"),
    ("response length (tokens)", "response_length/mean", "{:.1f}"),
    ("half are within", "response_length/p50", "{:.0f}"),
    ("95 % are within", "response_length/p95", "{:.0f}"),
    ("longest response", "response_length/max", "{:.0f}"),
    ("truncated responses", "response_length/truncated_fraction", "{:.1%}"),
    ("entropy (nats)", "policy/entropy", "{:.3f}"),
    ("token probability", "policy/token_probability_mean", "{:.3f}"),
    ("slowest group (s)", "time/group_max_s", "{:.1f}"),
    ("engines busy", "rollout/engine_busy_share", "{:.0%}"),
)
_ARTEFACTS = (
    ("config.json", "resolved configuration"),
    (METRICS_FILE, "every metric, one object a step"),
    (EVALUATIONS_FILE, "every held-out evaluation"),
    (TENSORBOARD_FOLDER, "tensorboard --logdir"),
    ("checkpoints", "checkpoints"),
    ("plot.png", "curves"),
    (LOG_FILE, "log"),
)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run from its first recorded step to its last."""

    folder: Path
    first: MetricRecord
    last: MetricRecord
    held_out_first: EvaluationRecord | None
    held_out_last: EvaluationRecord | None
    wall_s: float
    """Seconds spent in recorded steps, start-up and evaluation left out."""
    tokens_generated: int
    tokens_stopped: int
    tokens_trained: int
    groups_sampled: int
    groups_kept: int
    ratio_first_max_error: float | None
    """Worst first-mini-batch ratio error of any step."""
    logprob_abs_max: float | None
    """Worst trainer/engine log-prob gap of any step."""
    preemptions: int | None
    """Responses that vLLM preempted for lack of key-value cache; None: not measured."""
    kv_use_max: float | None
    """Largest share of an engine's key-value cache in use at any step."""


def summarise(folder: Path) -> RunSummary:
    """Return the summary of a run folder.

    Raises:
        DataError: no step is recorded yet.
    """
    records = read_metrics(folder)
    if not records:
        raise DataError(f"{folder}: no steps are recorded in {METRICS_FILE}; is this a run folder?")
    steps = [r for r in records if r.get("time/step_s") is not None] or records
    evaluations = read_evaluations(folder)
    preemptions = _values(records, "rollout/preemptions")
    return RunSummary(
        folder=folder,
        first=steps[0],
        last=steps[-1],
        held_out_first=evaluations[0] if evaluations else None,
        held_out_last=evaluations[-1] if evaluations else None,
        wall_s=sum(_values(records, "time/step_s")),
        tokens_generated=round(sum(_values(records, "tokens/generated"))),
        tokens_stopped=round(sum(_values(records, "tokens/stopped"))),
        tokens_trained=round(sum(_values(records, "tokens/trained"))),
        groups_sampled=round(sum(_values(records, "groups/sampled"))),
        groups_kept=round(sum(_values(records, "groups/kept"))),
        ratio_first_max_error=_worst(_values(records, "policy/ratio_first_max_error")),
        logprob_abs_max=_worst(_values(records, "parity/logprob_abs_max")),
        preemptions=round(sum(preemptions)) if preemptions else None,
        kv_use_max=_worst(_values(records, "rollout/kv_use_max")),
    )


def print_report(folder: Path, *, console: Console | None = None) -> RunSummary:
    """Print the before/after table of a run, its files and next commands; return the summary."""
    summary = summarise(folder)
    cost_table = Table.grid(padding=(0, 2))
    for row in costs(summary):
        cost_table.add_row(*row)
    files = Table.grid(padding=(0, 2))
    for name, what in _ARTEFACTS:
        if (folder / name).exists():
            files.add_row(what, str(folder / name))
    console = console or Console()
    console.print(Group(_before_after_table(summary), cost_table, Text(), files, Text()))
    console.print(
        f"Train further:    megadapo train {folder} --run.num_steps=N\n"
        f"Draw the curves:  megadapo plot {folder}\n"
        f"Write a report:   megadapo report {folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return summary


def _values(records: list[MetricRecord], name: str) -> list[int | float]:
    return [value for record in records if (value := record.get(name)) is not None]


def _worst(values: list[int | float]) -> int | float | None:
    """Return the largest value; NaN counts as the largest."""
    return max(values, key=lambda value: (math.isnan(value), value), default=None)


def before_after(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return (label, first step, last step) as text; "-" stands for a missing value."""
    return [*_held_out_rows(summary), *_step_rows(summary)]


def costs(summary: RunSummary) -> list[tuple[str, str]]:
    """Return time, tokens, groups and exactness of the run as (label, text)."""
    cache = []
    if summary.preemptions is not None and summary.kv_use_max is not None:
        used = f"{summary.kv_use_max:.0%} in use at most, {summary.preemptions:,} preemptions"
        cache = [("key-value cache", used)]
    return [
        ("time in steps", str(timedelta(seconds=round(summary.wall_s)))),
        ("tokens", _tokens(summary)),
        ("groups", f"{summary.groups_sampled:,} sampled, {summary.groups_kept:,} kept"),
        *cache,
        ("first ratio off by", _cell(summary.ratio_first_max_error, "{:.1e} at most")),
        ("trainer/engine gap", _cell(summary.logprob_abs_max, "{:.1e} nats at most")),
    ]


def _tokens(summary: RunSummary) -> str:
    stopped = f"{summary.tokens_stopped:,} of stopped responses, " if summary.tokens_stopped else ""
    return f"{summary.tokens_generated:,} generated, {stopped}{summary.tokens_trained:,} trained on"


def _held_out_rows(summary: RunSummary) -> list[tuple[str, str, str]]:
    before, after = summary.held_out_first, summary.held_out_last
    if before is None or after is None:
        return []
    name = f"held-out accuracy (avg@{after.samples_per_problem}, {after.num_problems} problems)"
    lengths = f"{before.response_length:.1f}", f"{after.response_length:.1f}"
    return [
        (name, _held_out(before), _held_out(after)),
        ("held-out length (tokens)", *lengths),
    ]


def _step_rows(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return a row for each metric that was measured at either end."""
    rows = []
    for label, name, form in _ROWS:
        first, last = summary.first.get(name), summary.last.get(name)
        if first is not None or last is not None:
            rows.append((label, _cell(first, form), _cell(last, form)))
    return rows


def _before_after_table(summary: RunSummary) -> Table:
    table = Table(title=f"{summary.folder}: before and after")
    table.add_column("")
    table.add_column(f"step {summary.first['step']}", justify="right")
    table.add_column(f"step {summary.last['step']}", justify="right", style="bold")
    held_out = _held_out_rows(summary)
    for number, row in enumerate(before_after(summary), start=1):
        table.add_row(*row, end_section=number == len(held_out))
    return table


def _held_out(evaluation: EvaluationRecord) -> str:
    return f"{evaluation.accuracy:.3f} ± {evaluation.standard_error:.3f} (step {evaluation.step})"


def _cell(value: int | float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
