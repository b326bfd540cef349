"""What several commands share: their parsers, and the configuration that most of them read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    from megadapo.config import RunConfig

OVERRIDES = (
    "--section.key=value sets any key of the configuration (a TOML value, or bare text); "
    "megadapo config explains them all."
)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns: argparse has no public name for it."""


def add_command(
    commands: Commands, name: str, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """Declare one command; `takes_overrides` lets --section.key=value follow its own options."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=OVERRIDES if takes_overrides else "",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_overrides=takes_overrides)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the recipe, or run folder, that a command works on, and where it starts."""
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        help="newest complete checkpoint, none, or this one; the same as --run.resume",
    )


def load_checked(arguments: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """Return the configuration, and what of it could not be checked without starting anything."""
    from megadapo.config import load_config
    from megadapo.config.preflight import check_run

    overrides = [] if arguments.resume is None else [f"run.resume={arguments.resume}"]
    if Path(arguments.config).is_dir():
        # Whoever names a run's folder means that folder, from wherever and however it was started.
        overrides = [f"run.folder={arguments.config}", "run.resume=auto", *overrides]
    config = load_config(arguments.config, [*overrides, *arguments.overrides])
    return config, check_run(config)


class Spinner:
    """Says on the console which part is being started."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._console.status(name):
            yield
