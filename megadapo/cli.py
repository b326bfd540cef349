"""The `megadapo` command: reads the command line and calls the one function behind each command.

Nothing heavy is imported before a command needs it, so `--help` and `--dry-run` answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo import __version__
from megadapo.errors import ConfigError, MegadapoError

if TYPE_CHECKING:
    from megadapo.config import RunConfig

EXIT_KEYBOARD_INTERRUPT = 130

_OVERRIDES = "--section.key=value sets any key of the configuration (a TOML value, or bare text)."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; a MegadapoError is one message on stderr."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    try:
        arguments.overrides = _overrides(arguments, rest)
        return arguments.command(arguments)
    except MegadapoError as error:
        print(f"megadapo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megadapo: interrupted", file=sys.stderr)
        return EXIT_KEYBOARD_INTERRUPT


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="megadapo",
        description="DAPO training of reasoning models at Megatron scale.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megadapo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    _add_eval(commands)
    _add_convert(commands)
    _add_weights(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_plot(commands)
    _add_doctor(commands)
    return parser


_Commands = argparse._SubParsersAction


def _add(
    commands: _Commands, name: str, summary: str, *, epilog: str = ""
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=summary, description=summary, epilog=epilog, allow_abbrev=False
    )


def _overrides(arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return what the parser left over, which must be overrides of a command that takes them."""
    takes_overrides = getattr(arguments, "takes_overrides", False)
    for text in rest:
        if not takes_overrides or not text.startswith("--") or "." not in text.split("=")[0]:
            raise ConfigError(f"{text}: unknown argument; see megadapo --help")
    return rest


def _add_train(commands: _Commands) -> None:
    parser = _add(commands, "train", "train a model, or go on with a run", epilog=_OVERRIDES)
    _add_config(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration and its files, print it resolved, start nothing",
    )
    parser.set_defaults(command=_train, takes_overrides=True)


def _train(arguments: argparse.Namespace) -> int:
    from megadapo.config import to_toml

    config, notes = _load_checked(arguments)
    if arguments.dry_run:
        print(to_toml(config), end="")
        for note in notes:
            print(f"megadapo: {note}", file=sys.stderr)
        return 0
    from megadapo.train import train

    train(config)
    return 0


def _add_eval(commands: _Commands) -> None:
    parser = _add(
        commands, "eval", "score a run or a model on held-out problems", epilog=_OVERRIDES
    )
    _add_config(parser)
    parser.set_defaults(command=_eval, takes_overrides=True)


def _eval(arguments: argparse.Namespace) -> int:
    config, _ = _load_checked(arguments)
    from megadapo.evaluate import evaluate_policy

    evaluate_policy(config)
    return 0


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        help="newest complete checkpoint, none, or this one; the same as --run.resume",
    )


def _load_checked(arguments: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """Return the configuration, and what of it could not be checked without starting anything."""
    from megadapo.config import load_config
    from megadapo.preflight import check_run

    overrides = [] if arguments.resume is None else [f"run.resume={arguments.resume}"]
    if Path(arguments.config).is_dir():
        # Whoever names a run's folder means that folder, from wherever and however it was started.
        overrides = [f"run.folder={arguments.config}", "run.resume=auto", *overrides]
    config = load_config(arguments.config, [*overrides, *arguments.overrides])
    return config, check_run(config)


def _add_convert(commands: _Commands) -> None:
    from megadapo.weights import convert

    parser = _add(commands, "convert", "convert, inspect and compare model folders")
    convert.add_arguments(parser)
    parser.set_defaults(command=convert.run)


def _add_weights(commands: _Commands) -> None:
    from megadapo.weights import plan_report

    parser = _add(commands, "weights", "what a weight update moves")
    reports = parser.add_subparsers(metavar="REPORT", required=True)
    plan = _add(reports, "plan", "bytes per link and buffers of a run's update", epilog=_OVERRIDES)
    plan_report.add_arguments(plan)
    plan.set_defaults(command=plan_report.run, takes_overrides=True)


def _add_bench(commands: _Commands) -> None:
    from megadapo.bench import head_command, weights

    parser = _add(commands, "bench", "measure against the rivals that are installed")
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    head = _add(benches, "head", "the policy head: time, memory and error of every rival")
    head_command.add_arguments(head)
    head.set_defaults(command=head_command.run)
    update = _add(benches, "weights", "a weight update, shard to shard and gathering everything")
    weights.add_arguments(update)
    update.set_defaults(command=weights.run)


def _add_profile(commands: _Commands) -> None:
    from megadapo.observe import kernel_profile

    summary = "how every kernel compiles, or where the time of a training step or the head goes"
    parser = _add(commands, "profile", summary, epilog=_OVERRIDES)
    kernel_profile.add_arguments(parser)
    parser.set_defaults(command=kernel_profile.main, takes_overrides=True)


def _add_plot(commands: _Commands) -> None:
    parser = _add(commands, "plot", "draw the curves of one run, or of several over each other")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=Path, help="PNG to write; default: plot.png in RUN")
    parser.set_defaults(command=_plot)


def _plot(arguments: argparse.Namespace) -> int:
    from megadapo.observe.plot import PLOT_FILE, plot_runs

    output = arguments.output or arguments.runs[0] / PLOT_FILE
    print(plot_runs(arguments.runs, output))
    return 0


def _add_doctor(commands: _Commands) -> None:
    parser = _add(commands, "doctor", "say what this machine has and what megadapo will use")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from megadapo.observe.doctor import doctor

    return doctor(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
