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

    from megadapo.lab.ablation.plan import Plan
    from megadapo.lab.ablation.runner import Failure
    from megadapo.observe.report import TextTable

FOLDER = Path("runs") / "ablations"
"""Where ablations are kept, each by the name of its file of rows."""
COLUMN_GAP = 2
MARGIN = 2

ABOUT = """Train a recipe with each row of a file over it and with several seeds, every run in a
process of its own, and write a table with standard errors, curves and a report. What is finished
is not trained again and what was stopped goes on, so the same command continues an ablation."""


def add(commands: Commands) -> None:
    summary = "train variants of a recipe over several seeds, and compare them"
    parser = add_command(commands, "ablate", summary, takes_overrides=True)
    parser.description = ABOUT
    parser.add_argument("config", help="recipe (TOML) that the rows vary")
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="the rows (TOML)")
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="K", help="seeds, from run.seed on; default: 2"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help=f"default: {FOLDER}/ and the name of FILE"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs side by side; default: 1"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check every run, list them, start nothing"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.lab.ablation.plan import plan_ablation
    from megadapo.lab.ablation.rows import read_rows
    from megadapo.lab.ablation.runner import Runner

    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: at least 1 is needed")
    plan = plan_ablation(
        arguments.config,
        arguments.rows,
        read_rows(arguments.rows),
        num_seeds=arguments.seeds,
        folder=arguments.folder or FOLDER / arguments.rows.stem,
        overrides=arguments.overrides,
    )
    console = Console()
    if arguments.dry_run:
        for planned in plan.runs:
            _say(console, f"{planned.name}: {planned.standing()}, {planned.folder}")
        return 0
    failures = Runner(jobs=arguments.jobs, say=lambda text: _say(console, text)).train(plan.runs)
    return report(plan, failures, console)


def report(plan: Plan, failures: list[Failure], console: Console) -> int:
    """Show and write what an ablation came to; 1 where a run failed."""
    from megadapo.lab.ablation.report import write_reports
    from megadapo.lab.ablation.result import collect
    from megadapo.lab.ablation.tables import ablation_tables

    result = collect(plan, failures)
    tables = ablation_tables(result)
    for table in tables:
        for piece in fitting(table, console.width - MARGIN):
            _show(console, piece)
    for path in write_reports(result, tables):
        _say(console, str(path))
    return 1 if failures else 0


def fitting(table: TextTable, width: int) -> list[TextTable]:
    """Cut a table into some with fewer columns each, so that their cells need no second line.

    The first column is in each of them, and the last one may be broken into lines.
    """
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) + COLUMN_GAP for column in zip(*lines, strict=True)]
    pieces: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        used = sum(widths[taken] for taken in pieces[-1])
        if len(pieces[-1]) > 1 and used + widths[column] > width:
            pieces.append([0])
        pieces[-1].append(column)
    cut = [[[line[column] for column in piece] for line in lines] for piece in pieces]
    last = len(cut) - 1
    return [
        replace(
            table,
            title=table.title if number == 0 else "",
            note=table.note if number == last else "",
            head=head,
            rows=rows,
        )
        for number, (head, *rows) in enumerate(cut)
    ]


def _show(console: Console, table: TextTable) -> None:
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


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
