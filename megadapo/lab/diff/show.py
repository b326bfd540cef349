"""The result of a comparison as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from megadapo.lab.diff.compare import RunComparison
from megadapo.lab.diff.difference import Row, count
from megadapo.observe.tables import TextTable, printable, ranges

WIDTH = 100


def text_of_comparison(result: RunComparison) -> str:
    """Return the whole result: settings, the first difference, and what was not compared."""
    parts = [f"A  {result.a}\nB  {result.b}", *_settings(result)]
    if result.first is not None:
        parts += _first(result)
    else:
        steps = result.equal_steps
        parts.append(f"The runs are equal in {count(len(steps), 'step')} ({ranges(steps)}).")
    gaps = [f"step{'s' * (len(s) > 1)} {ranges(s)}: {reason}" for reason, s in result.gaps.items()]
    if gaps or result.notes:
        parts.append("\n".join(["Not compared:", *_list([*gaps, *result.notes])]))
    return printable("\n\n".join(parts))


def _settings(result: RunComparison) -> Iterator[str]:
    for title, rows in (
        ("Settings that decide what is learned differ:", result.learning_keys),
        ("Other settings differ:", result.other_keys),
    ):
        if rows:
            yield f"{title}\n{_table(rows)}"


def _first(result: RunComparison) -> Iterator[str]:
    first = result.first
    assert first is not None, "the caller checks it"
    lines = [f"The runs part in step {first.step}, {first.phase}: {first.place}."]
    yield "\n".join([*lines, *textwrap.wrap(" ".join(first.evidence), WIDTH)])
    if first.rows:
        yield _table(first.rows)
    if result.also:
        also = [f"{one.phase}: {one.place}" for one in result.also]
        yield "\n".join([f"Also in step {first.step}:", *_list(also)])
    if result.equal_steps:
        number = count(len(result.equal_steps), "step")
        yield f"Equal before: {number} ({ranges(result.equal_steps)})."


def _list(lines: Sequence[str] | Iterator[str]) -> list[str]:
    return [
        textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines
    ]


def _table(rows: Sequence[Row]) -> str:
    return textwrap.indent(TextTable(head=("", "A", "B"), rows=rows).text(), "  ")
