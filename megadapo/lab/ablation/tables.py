"""The tables of an ablation as text, shown on the console, in Markdown and in the HTML report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megadapo.lab.ablation.measures import END_STEPS, MEASURES, Measure, Spread
from megadapo.lab.ablation.result import AblationResult, Effect
from megadapo.observe.report import TextTable

PLUS_MINUS = "\u00b1"


def ablation_tables(result: AblationResult) -> list[TextTable]:
    """Measures of every row, differences between rows, expected effects, failures."""
    tables = [_measures(result), _differences(result)]
    if result.effects:
        tables.append(_effects(result))
    if result.failures:
        tables.append(_failures(result))
    return tables


def _measures(result: AblationResult) -> TextTable:
    plan, num = result.plan, len(result.plan.seeds)
    has_source = any(row.row.source for row in result.rows)
    note = (
        f"Mean {PLUS_MINUS} standard error over {num} seed{'s' if num != 1 else ''} "
        f"({', '.join(map(str, plan.seeds))}), {plan.runs[0].config.run.num_steps} steps each, on "
        f"{plan.config}. Entropy (nats) and length (tokens) are means of the last {END_STEPS} "
        f"steps, shares of all steps, seconds without start and evaluation. Steps are counted to "
        f"a held-out accuracy of {plan.rows.accuracy:g}, where evaluations see it; (k/n): k of n "
        "runs got there. No signal: groups all right or all wrong, of those sampled and of those "
        "trained on."
    )
    short = [f"{row.row.name}: {len(row.runs)}" for row in result.rows if len(row.runs) < num]
    if short:
        note += f" Seeds of rows whose others are not finished: {'; '.join(short)}."
    rows = [
        [row.row.name, *(_cell(row.spread(one.name), one, len(row.runs)) for one in MEASURES)]
        + [row.row.source] * has_source
        for row in result.rows
    ]
    head = ["row", *(one.label for one in MEASURES), *["source"] * has_source]
    return TextTable(title="Rows", note=note, head=head, rows=rows)


def _differences(result: AblationResult) -> TextTable:
    against = "the row before" if result.plan.rows.cumulative else "the first row"
    note = (
        f"Each row less {against}, seed by seed: mean {PLUS_MINUS} standard error, of shares in "
        "points; none where a seed lacks the measure, as one that did not reach the accuracy does. "
        "Several differences are looked at, so a few of them leave 0 by chance."
    )
    if result.unchanged:
        note += (
            f" All numbers but the seconds are those of {against}: {'; '.join(result.unchanged)}. "
            "What these rows change had nothing to act on."
        )
    rows = [
        [row, *(_cell(result.difference(row, other, one), one, sign=True) for one in MEASURES)]
        for row, other in result.plan.rows.comparisons
    ]
    return TextTable(
        title="Differences", note=note, head=["row", *(one.label for one in MEASURES)], rows=rows
    )


def _effects(result: AblationResult) -> TextTable:
    note = (
        "What a row is said to change, and what was measured here. A difference counts as shown "
        "where its 95 % interval does not include 0: Student's t, with the scatter over the seeds "
        "taken from all rows' differences together."
    )
    measures = {one.name: one for one in MEASURES}
    rows = []
    for effect in result.effects:
        one = measures[effect.expectation.measure]
        rows.append(
            [
                effect.row,
                f"{one.label} {effect.expectation.change}",
                _cell(effect.difference, one, sign=True),
                _interval(effect, one),
                effect.verdict,
                effect.expectation.source,
            ]
        )
    head = ["row", "expected", "difference", "95 % interval", "verdict", "source"]
    return TextTable(title="Effects", note=note, head=head, rows=rows)


def _failures(result: AblationResult) -> TextTable:
    rows = [
        [failure.run.name, str(failure.exit_code), failure.message, str(failure.run.log)]
        for failure in result.failures
    ]
    note = "These runs have no part in the numbers."
    return TextTable(
        title="Failed runs", note=note, head=["run", "exit code", "message", "log"], rows=rows
    )


def _cell(
    spread: Spread | None, one: Measure, num_runs: int | None = None, *, sign: bool = False
) -> str:
    if spread is None:
        return "-"
    form = one.form.replace("{:", "{:+") if sign else one.form
    parts = [form.format(spread.mean)]
    if spread.standard_error is not None:
        parts += [PLUS_MINUS, one.form.format(spread.standard_error)]
    if num_runs is not None and spread.num < num_runs:
        parts.append(f"({spread.num}/{num_runs})")
    return " ".join(parts)


def _interval(effect: Effect, one: Measure) -> str:
    if effect.interval is None:
        return "-"
    form = one.form.replace("{:", "{:+")
    return " to ".join(form.format(bound) for bound in effect.interval)


def markdown(title: str, tables: Sequence[TextTable]) -> str:
    """The tables as a Markdown page."""
    return "\n".join([f"# {title}", *(line for table in tables for line in _lines(table))]) + "\n"


def _lines(table: TextTable) -> Iterator[str]:
    yield from ("", f"## {table.title}", "", table.note, "")
    yield _line(table.head)
    yield _line(
        [_alignment([row[column] for row in table.rows]) for column in range(len(table.head))]
    )
    for row in table.rows:
        yield _line(row)


def _alignment(cells: Sequence[str]) -> str:
    """Numbers end at the right, words begin at the left."""
    return "---:" if all(re.match(r"[-+]?\d|-$", cell) for cell in cells) else "---"


def _line(cells: Sequence[str]) -> str:
    # a bar or a line break within a cell would end it
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(plain) + " |"
