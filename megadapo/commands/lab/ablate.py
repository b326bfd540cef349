"""`megadapo ablate`: train variants of a recipe over several seeds, and compare them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

FOLDER = Path("runs") / "ablations"
"""Parent of the ablations' folders, which are named like their rows files."""

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

    from megadapo.lab.ablation.report import ablation_tables, collect, write_reports
    from megadapo.lab.ablation.rows import Ablation
    from megadapo.lab.ablation.runner import train_runs

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
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if arguments.dry_run:
        for each in ablation.runs:
            show(f"{each.name}: {each.state()}, {each.folder}")
        return 0
    result = collect(ablation, train_runs(ablation.runs, jobs=arguments.jobs, show=show))
    tables = ablation_tables(result)
    for table in tables:
        print(table.text(console.width), end="\n\n")
    for path in write_reports(result, tables):
        show(str(path))
    return 1 if result.failures else 0
