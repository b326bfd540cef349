"""`megadapo config`: print every key of the configuration with type, default and meaning."""

from __future__ import annotations

import argparse
import json

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError


def add(commands: Commands) -> None:
    parser = add_command(commands, "config", "explain the keys of the configuration")
    parser.add_argument(
        "name",
        nargs="?",
        metavar="SECTION|RECIPE",
        help="a section, such as trainer.optimizer (default: all), or a recipe with --diff",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--diff", metavar="BASE", help="print the keys in which RECIPE differs from another recipe"
    )
    what.add_argument(
        "--schema", action="store_true", help="print the JSON schema of a recipe, for editors"
    )
    what.add_argument("--markdown", action="store_true", help="print docs/configuration.md")
    what.add_argument("--metrics", action="store_true", help="print docs/metrics.md")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from megadapo.config import manual

    if arguments.name is not None and (arguments.schema or arguments.markdown or arguments.metrics):
        raise ConfigError(f"{arguments.name}: --schema, --markdown and --metrics print everything")
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
    if arguments.diff is not None:
        print(_differences(arguments.name, arguments.diff))
        return 0
    console = Console()
    for name, description, rows in manual.tables(arguments.name):
        console.print(Text(f"[{name}] ", style="bold") + Text(description))
        for row in rows:
            default = f" = {row.default}" if row.default else ", required"
            console.print(Text(row.name, "cyan") + Text(f": {row.type}{default}", "default"))
            console.print(Padding(Text(row.description), (0, 0, 0, 4)))
        console.print()
    return 0


def _differences(recipe: str | None, base: str) -> str:
    """Return the keys in which two recipes differ: a row with both values for each."""
    from megadapo.config import load_config, to_dict
    from megadapo.config.recipe import toml_value
    from megadapo.observe.run_records import leaves
    from megadapo.observe.tables import TextTable

    if recipe is None:
        raise ConfigError("--diff compares two recipes: megadapo config RECIPE --diff BASE")
    first, second = (dict(leaves(to_dict(load_config(one)))) for one in (base, recipe))
    rows = [
        [key, *(toml_value(one[key]) if key in one else "" for one in (first, second))]
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    ]
    title = f"{len(rows)} keys differ"
    return TextTable(title=title, head=["", base, recipe], rows=rows).text()
