"""`megadapo config`: print every key of the configuration with type, default and meaning."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command

if TYPE_CHECKING:
    from megadapo.config import manual


def add(commands: Commands) -> None:
    parser = add_command(commands, "config", "explain the keys of the configuration")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "section", nargs="?", metavar="SECTION", help="such as trainer.optimizer (default: all)"
    )
    what.add_argument(
        "--schema", action="store_true", help="print the JSON schema of a recipe, for editors"
    )
    what.add_argument("--markdown", action="store_true", help="print docs/configuration.md")
    what.add_argument("--metrics", action="store_true", help="print docs/metrics.md")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import manual

    if arguments.schema:
        print(json.dumps(manual.json_schema(), indent=2))
    elif arguments.markdown:
        print(manual.markdown(), end="")
    elif arguments.metrics:
        from megadapo.observe.metrics.page import metrics_page

        print(metrics_page(), end="")
    else:
        _show(manual.tables(arguments.section))
    return 0


def _show(tables: list[manual.Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for table in tables:
        console.print(Text(f"[{table.name}] ", style="bold") + Text(table.description))
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("key", style="cyan", no_wrap=True)
        for column in ("type", "default", ""):
            shown.add_column(column, overflow="fold")
        for row in table.rows:
            default = Text(row.default or "required", style="" if row.default else "bold")
            shown.add_row(Text(row.name), Text(row.type), default, Text(row.description))
        console.print(shown)
