"""Tables and other texts: for the terminal, in Markdown, and on the report's page."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

GAP = "  "


def printable(text: str) -> str:
    """Return text with unprintable characters as escapes, except for line breaks and tabs.

    A terminal obeys escape sequences, which a model can write.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def formatted(value: float | None, form: str) -> str:
    """Return a number in a format such as ".3f", "-" for None."""
    return "-" if value is None else format(value, form)


def count(number: int, noun: str) -> str:
    """Return "1 step" or "2 steps" for the noun "step"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, "1-3, 7" for 1, 2, 3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def stretches(values: Sequence[T], limit: int) -> list[Sequence[T]]:
    """Return the values in at most `limit` stretches of nearly equal lengths."""
    number = min(len(values), limit)
    edges = [round(i * len(values) / number) for i in range(number + 1)] if values else []
    return [values[start:end] for start, end in pairwise(edges)]


def new_console(*, stderr: bool = False) -> Console:
    """Return a console; in a notebook, whose output says that it is a terminal, one of lines."""
    from rich.console import Console

    is_terminal = False if Console().is_jupyter else None
    return Console(stderr=stderr, force_jupyter=False, force_terminal=is_terminal)


def print_error(text: str) -> None:
    """Print a message on stderr; a lost console ends no run and changes no exit code."""
    try:
        print(f"megadapo: {printable(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_output(sys.stderr)


def discard_output(lost: IO[str]) -> None:
    """Discard later writes to stdout and stderr as far as they share a file with a lost console.

    Otherwise each of them fails as well, and so does the flush when Python exits.
    """
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        descriptors = {lost.fileno()} | {
            number for number in (1, 2) if os.path.sameopenfile(number, lost.fileno())
        }
        for descriptor in descriptors:
            os.dup2(nowhere.fileno(), descriptor)


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table whose columns of numbers are aligned right, and whose other columns left."""

    title: str = ""
    note: str = ""
    head: Sequence[str]
    """Names of the columns; all empty for a table without a head."""
    rows: Sequence[Sequence[str]]

    def text(self, width: int | None = None) -> str:
        """Return lines for a terminal, the note last.

        Args:
            width: most characters of a line. Columns beyond it follow in further parts, which
                repeat the first column; a column that is too wide alone is a part of its own.
        """
        lines = [self.head, *self.rows] if any(self.head) else self.rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts = [[0]]
        for column in range(1, len(widths)):
            used = sum(widths[other] + len(GAP) for other in parts[-1])
            if width and len(parts[-1]) > 1 and used + widths[column] > width:
                parts.append([0])
            parts[-1].append(column)
        are_numbers = list(self._are_numbers())
        shown = [self.title] * bool(self.title)
        for part in parts:
            shown += [""] * (part is not parts[0])
            for line in lines:
                cells = (
                    line[column].rjust(widths[column])
                    if are_numbers[column]
                    else line[column].ljust(widths[column])
                    for column in part
                )
                shown.append(GAP.join(cells).rstrip())
        return "\n".join([*shown, *["", self.note] * bool(self.note)])

    def markdown(self) -> str:
        """Return the table below a heading of the second level and its note."""
        rules = ["---:" if is_number else "---" for is_number in self._are_numbers()]
        lines = (_markdown_line(cells) for cells in (self.head, rules, *self.rows))
        return "\n".join(["", f"## {self.title}", "", self.note, "", *lines])

    def _are_numbers(self) -> Iterator[bool]:
        """Return whether each column but the first has only numbers, "-" and empty cells."""
        for column in range(len(self.head)):
            cells = (row[column] for row in self.rows)
            yield column > 0 and all(re.match(r"[-+]?\d|-?$", cell) for cell in cells)


def _markdown_line(cells: Sequence[str]) -> str:
    # a bar or a line break would end the cell
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(plain) + " |"
