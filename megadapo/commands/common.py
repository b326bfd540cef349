"""Parsers and configuration loading that several commands share."""

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
    "megadapo config explains all keys."
)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The type that `add_subparsers` returns, for which argparse has no public name."""


def add_command(
    commands: Commands, name: str, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """Declare one command; `takes_overrides` allows --section.key=value after its options."""
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
    """Declare the arguments `config` and --resume."""
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        help="start from the newest complete checkpoint, none, or PATH; same as --run.resume",
    )


def load_checked(arguments: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """Return the configuration and warnings about it.

    Raises:
        MegadapoError: the configuration, or a file that it names, is wrong.
    """
    from megadapo.config import load_config
    from megadapo.config.preflight import check_run

    overrides = [] if arguments.resume is None else [f"run.resume={arguments.resume}"]
    if Path(arguments.config).is_dir():
        # a run's folder stands for that run, even if config.json has another path or run.resume
        overrides = [f"run.folder={arguments.config}", "run.resume=auto", *overrides]
    config = load_config(arguments.config, [*overrides, *arguments.overrides])
    return config, check_run(config)


class Spinner:
    """A spinner on the console with the name of the part that starts."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._console.status(name):
            yield
