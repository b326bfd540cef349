"""The summary of a run: before and after, its costs, its files, next commands and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megadapo.observe.metrics.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    EvaluationRecord,
    MetricRecord,
    has_rollouts,
    mean_of,
)
from megadapo.observe.metrics.writers import TENSORBOARD_FOLDER
from megadapo.observe.run_records import LOG_FILE, RESOLVED_FILE, RunRecords
from megadapo.observe.tables import formatted, new_console, printable

_ROWS = (
    ("training accuracy", "accuracy/mean", ".3f"),
    ("reward", "reward/mean", "+.3f"),
    ("response length (tokens)", "response_length/mean", ".1f"),
    ("95 % are within", "response_length/p95", ".0f"),
    ("longest response", "response_length/max", ".0f"),
    ("truncated responses", "response_length/truncated_fraction", ".1%"),
    ("entropy (nats)", "policy/entropy", ".3f"),
    ("slowest group (s)", "time/group_max_s", ".1f"),
    ("engines busy", "rollout/engine_busy_share", ".0%"),
)
_ROWS_WITHOUT_ROLLOUTS = (
    ("loss (nats per token)", "policy/loss", ".4f"),
    ("held-out loss", "eval/loss", ".4f"),
)
_FILES = (
    *(RESOLVED_FILE, METRICS_FILE, EVALUATIONS_FILE, LOG_FILE),
    *(TENSORBOARD_FOLDER, "checkpoints", "plot.png"),
)


def print_report(folder: Path, *, console: Console | None = None, command: str = "train") -> None:
    """Print the before/after table of a run, its costs, files, next commands and warnings.

    `command`: the command of the run.
    """
    run = RunRecords(folder)
    records, evaluations = run.need_steps(), run.evaluations
    table = Table(title=f"{folder}: before and after")
    table.add_column("")
    table.add_column(f"step {records[0]['step']}", justify="right")
    table.add_column(f"step {records[-1]['step']}", justify="right", style="bold")
    num_held_out = len(_held_out_rows(evaluations))
    for number, row in enumerate(before_after(records, evaluations), start=1):
        table.add_row(*row, end_section=number == num_held_out)
    cost_table = Table.grid(padding=(0, 2))
    for cost in costs(records):
        cost_table.add_row(*cost)
    files = " ".join(name for name in _FILES if (folder / name).exists())
    console = console or new_console()
    console.print(Group(table, cost_table, Text()))
    responses = f"Read responses:   megadapo show {folder} [STEP]\n" * bool(run.saved_steps)
    console.print(
        f"Files:            {files}\n"
        f"{responses}"
        f"Write a report:   megadapo report {folder}\n"
        f"Export the model: megadapo export {folder} DST\n"
        f"Train further:    megadapo {command} {folder} --run.num_steps=N\n"
        f"Curves here:      megadapo top {folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for text in run.warnings:
        console.print()
        console.print(Text(f"warning: {printable(text)}", style="yellow"), soft_wrap=True)


def before_after(
    records: Sequence[MetricRecord], evaluations: Sequence[EvaluationRecord]
) -> list[tuple[str, str, str]]:
    """Return (label, first, last) as text, for each metric that was measured at either end."""
    rows = _held_out_rows(evaluations)
    more = () if has_rollouts(records[-1]) else _ROWS_WITHOUT_ROLLOUTS
    for label, name, form in (*more, *_ROWS):
        first, last = records[0].get(name), records[-1].get(name)
        if first is not None or last is not None:
            rows.append((label, formatted(first, form), formatted(last, form)))
    return rows


def costs(records: Sequence[MetricRecord]) -> list[tuple[str, str]]:
    """Return time, tokens, groups and exactness of the run as (label, text)."""

    def values(name: str) -> list[int | float]:
        return [value for record in records if (value := record.get(name)) is not None]

    def total(name: str) -> int:
        return round(sum(values(name)))

    def worst(*names: str) -> int | float | None:
        """Return the largest value; NaN counts as the largest."""
        found = [value for name in names for value in values(name)]
        return max(found, key=lambda value: (math.isnan(value), value), default=None)

    time_row = ("time in steps", str(timedelta(seconds=total("time/step_s"))))
    if not has_rollouts(records[-1]):
        return [time_row, ("tokens", f"{total('tokens/trained'):,} trained on")]
    stopped = total("tokens/stopped")
    tokens = f"{total('tokens/generated'):,} generated, "
    tokens += f"{stopped:,} of stopped responses, " if stopped else ""
    tokens += f"{total('tokens/trained'):,} trained on"
    groups = f"{total('groups/sampled'):,} sampled, {total('groups/kept'):,} kept"
    rows = [time_row, ("tokens", tokens), ("groups", groups)]
    cache_use = worst("rollout/kv_use_max")
    if cache_use is not None:
        preemptions = f"{total('rollout/preemptions'):,} preemptions"
        rows.append(("key-value cache", f"{cache_use:.0%} in use at most, {preemptions}"))
    ratio = worst("policy/ratio_first_max_error")
    gap = worst("parity/logprob_abs_max", "parity/probe_abs_max")
    return [
        *rows,
        ("first ratio off by", "-" if ratio is None else f"{ratio:.1e} at most"),
        ("trainer/engine gap", "-" if gap is None else f"{gap:.1e} nats at most"),
    ]


def _held_out_rows(evaluations: Sequence[EvaluationRecord]) -> list[tuple[str, str, str]]:
    if not evaluations:
        return []
    before, after = evaluations[0], evaluations[-1]
    name = (
        f"held-out {after.measure} (avg@{after.samples_per_problem}, {after.num_problems} problems)"
    )
    lengths = f"{before.response_length:.1f}", f"{after.response_length:.1f}"
    return [
        (name, _held_out(before), _held_out(after)),
        *(
            (f"held-out {what}@{after.samples_per_problem}", f"{first:.3f}", f"{last:.3f}")
            for what, first, last in (
                ("pass", before.best_of_all, after.best_of_all),
                ("cons", before.consensus, after.consensus),
            )
            if first is not None and last is not None and after.samples_per_problem > 1
        ),
        *(
            (
                f"of {one} ({own['num_problems']:.0f} problems)",
                _of_set(before, one),
                _of_set(after, one),
            )
            for one, own in after.sets.items()
        ),
        ("held-out length (tokens)", *lengths),
    ]


def _of_set(evaluation: EvaluationRecord, name: str) -> str:
    own = evaluation.sets.get(name)
    return "-" if own is None else f"{mean_of(own):.3f} ± {own['standard_error']:.3f}"


def _held_out(evaluation: EvaluationRecord) -> str:
    return f"{evaluation.mean:.3f} ± {evaluation.standard_error:.3f} (step {evaluation.step})"
