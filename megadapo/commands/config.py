"""`megadapo config`: print every key of the configuration with type, default and meaning."""

from __future__ import annotations

import argparse
import json

from megadapo.commands.common import Commands, add_command


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
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megadapo.config import manual

    if arguments.schema:
        print(json.dumps(manual.json_schema(), indent=2))
        return 0
    if arguments.markdown:
        print(manual.markdown(), end="")
        return 0
    if arguments.metrics:
        from megadapo.observe.metrics.page import metrics_page

        print(metrics_page(), end="")
        return 0
    console = Console()
    for name, description, rows in manual.tables(arguments.section):
        console.print(Text(f"[{name}] ", style="bold") + Text(description))
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("key", style="cyan", no_wrap=True)
        for column in ("type", "default", ""):
            shown.add_column(column, overflow="fold")
        for row in rows:
            default = Text(row.default or "required", style="" if row.default else "bold")
            shown.add_row(Text(row.name), Text(row.type), default, Text(row.description))
        console.print(shown)
    return 0
