"""Parsers, configuration loading and the start of a run, which several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from megadapo.observe.tables import print_error

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.config.preflight import ColumnReader

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


def load_checked(
    arguments: argparse.Namespace,
    *,
    rows: ColumnReader | None = None,
    has_values: bool = False,
    trains: bool = True,
) -> tuple[RunConfig, list[str]]:
    """Return the configuration and warnings about it.

    Args:
        rows: reads the rows of a run without rollouts; None for a run with rollouts.
        has_values: whether the run trains a reward model.
        trains: as in `load_config`.
    """
    from megadapo.config import load_config
    from megadapo.config.preflight import check_run

    overrides = [] if arguments.resume is None else [f"run.resume={arguments.resume}"]
    config = load_config(arguments.config, [*overrides, *arguments.overrides], trains=trains)
    has_engines = getattr(arguments, "replay", None) is None
    return config, check_run(config, rows=rows, has_values=has_values, has_engines=has_engines)


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every command that starts a run."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration, the first rows of its files and the GPUs' memory; print it, "
        "with megadapo train also the first prompt with its token ids and gold answer, and exit",
    )
    parser.add_argument(
        "--restarts",
        type=whole_number,
        default=0,
        metavar="N",
        help="restart at most N times after failed processes or preemption, but never after an "
        "error in the configuration, the data or an oracle; default: 0",
    )
    parser.add_argument(
        "--give-up-after",
        type=seconds,
        default="24h",
        metavar="TIME",
        help="with --restarts: repeat starts that make no progress, as without nodes, for this "
        "time, such as 90m, 24h or 3d; they do not count as restarts; default: 24h",
    )
    parser.add_argument(
        "--accept-changes",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="KEY[,KEY]",
        help="resume although these keys, which decide what is learned, have changed since the "
        "checkpoint, as in --accept-changes=reward.rule",
    )
    parser.add_argument(
        "--allow-fewer",
        action="store_true",
        help="if nodes of the cluster are missing after cluster.start_timeout_s, start with fewer "
        "data-parallel ranks and engines",
    )


def start_run(
    arguments: argparse.Namespace,
    command: str,
    config: RunConfig,
    warnings: Sequence[str],
    start: Callable[[], None],
    words: Sequence[str] = (),
) -> int:
    """Print the configuration, supervise a driver or be the driver, as the options ask; return 0.

    Args:
        command: the command, which a supervisor starts again.
        warnings: about the configuration, for --dry-run.
        start: trains in this process.
        words: further options for a supervised driver.
    """
    if arguments.accept_changes:
        from megadapo.run.state.resume import check_accepted

        check_accepted(config, arguments.accept_changes)
    if arguments.dry_run:
        from megadapo.config import to_toml

        print(to_toml(config), end="")
        for warning in warnings:
            print_error(warning)
        return 0
    if arguments.restarts > 0:
        from megadapo.run.state.supervisor import Supervisor

        # one driver's command, without the supervisor's options
        driver = [sys.executable, "-m", "megadapo.cli", command, arguments.config]
        if arguments.resume is not None:
            driver += ["--resume", arguments.resume]
        driver += words
        if arguments.accept_changes:
            driver.append(f"--accept-changes={','.join(arguments.accept_changes)}")
        if arguments.allow_fewer:
            driver.append("--allow-fewer")
        return Supervisor(
            [*driver, *arguments.overrides],
            config.run.folder,
            max_restarts=arguments.restarts,
            give_up_after_s=arguments.give_up_after,
            on_event=config.run.on_event,
            say=print_error,
        ).run()
    start()
    return 0


def whole_number(text: str) -> int:
    """Return a number of 0 or more."""
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """Return the seconds of a time such as 90, 90m, 24h or 3d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90m, 24h or 3d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
