"""`megadapo ablate`: train variants of a recipe over several seeds, and compare them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from megadapo.lab.ablation.rows import Ablation
    from megadapo.lab.ablation.runner import Failure
    from megadapo.observe.report import TextTable

FOLDER = Path("runs") / "ablations"
"""Parent of the ablations' folders, which are named like their rows files."""
COLUMN_GAP = 2
MARGIN = 2

ABOUT = """Train a recipe with the overrides of each row of a file and with several seeds. Every run
is a separate process. Write a table with standard errors, curves and a report. The same command
continues a stopped ablation: it skips finished runs and resumes the others."""


def add(commands: Commands) -> None:
    summary = "train variants of a recipe over several seeds, and compare them"
    parser = add_command(commands, "ablate", summary, takes_overrides=True)
    parser.description = ABOUT
    parser.add_argument("config", help="recipe (TOML) that the rows vary")
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="rows (TOML)")
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="K", help="seeds from run.seed on (default 2)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help=f"folder of runs and report (default {FOLDER}/ and the name of FILE)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs side by side (default 1)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check and list all runs, start nothing"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.lab.ablation.rows import Ablation
    from megadapo.lab.ablation.runner import Runner

    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    ablation = Ablation.of(
        arguments.config,
        arguments.rows,
        num_seeds=arguments.seeds,
        folder=arguments.folder or FOLDER / arguments.rows.stem,
        overrides=arguments.overrides,
    )
    console = Console()
    if arguments.dry_run:
        for each in ablation.runs:
            _print_line(console, f"{each.name}: {each.state()}, {each.folder}")
        return 0
    runner = Runner(jobs=arguments.jobs, show=lambda text: _print_line(console, text))
    return report(ablation, runner.train(ablation.runs), console)


def report(ablation: Ablation, failures: list[Failure], console: Console) -> int:
    """Print and write an ablation's results; return 1 if a run failed."""
    from megadapo.lab.ablation.report import ablation_tables, write_reports
    from megadapo.lab.ablation.result import collect

    result = collect(ablation, failures)
    tables = ablation_tables(result)
    for table in tables:
        for piece in fitting(table, console.width - MARGIN):
            _print_table(console, piece)
    for path in write_reports(result, tables):
        _print_line(console, str(path))
    return 1 if failures else 0


def fitting(table: TextTable, width: int) -> list[TextTable]:
    """Split a table by columns, so that each part fits the width without line breaks.

    Every part has the first column; a column wider than `width` is a part of its own.
    """
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) + COLUMN_GAP for column in zip(*lines, strict=True)]
    pieces: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        used = sum(widths[taken] for taken in pieces[-1])
        if len(pieces[-1]) > 1 and used + widths[column] > width:
            pieces.append([0])
        pieces[-1].append(column)
    parts = [[[line[column] for column in piece] for line in lines] for piece in pieces]
    last = len(parts) - 1
    return [
        replace(
            table,
            title=table.title if number == 0 else "",
            note=table.note if number == last else "",
            head=head,
            rows=rows,
        )
        for number, (head, *rows) in enumerate(parts)
    ]


def _print_table(console: Console, table: TextTable) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        title=table.title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in table.head:
        shown.add_column(Text(name))
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    if table.note:
        console.print(Text(table.note, style="dim"), Text())


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
