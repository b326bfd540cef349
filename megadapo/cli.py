"""The `megadapo` command: parses the command line and runs one command.

Commands import heavy packages only when they need them, so `--help` and `--dry-run` are fast.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence

from megadapo import __version__
from megadapo.commands import (
    config,
    convert,
    doctor,
    engines,
    eval,
    export,
    new,
    plan,
    report,
    rollout,
    show,
    stages,
    status,
    train,
)
from megadapo.commands.lab import ablate, bench, diff, profile, simulate, weights, whatif
from megadapo.errors import ConfigError, InfraError, MegadapoError
from megadapo.observe.tables import discard_output, print_error

EXIT_KEYBOARD_INTERRUPT = 130
EXIT_LOST_OUTPUT = 141

COMMANDS = (
    *(new, train, stages, rollout, eval, export, convert, plan, weights, bench, simulate),
    *(profile, ablate, whatif, status, engines, show, report, diff, config, doctor),
)
"""Modules of the commands, in the order of --help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; print errors as `report_errors` does."""
    return report_errors(lambda: run_command(argv))


def report_errors(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; print a MegadapoError as one message on stderr.

    The message of an unforeseen error of a file names the file.
    """
    try:
        code = run()
        try:
            sys.stdout.flush()
        except OSError:
            discard_output(sys.stdout)
        return code
    except BrokenPipeError:
        # as with `megadapo config | head`
        discard_output(sys.stdout)
        return EXIT_LOST_OUTPUT
    except OSError as error:
        if error.filename is None:
            raise
        print_error(f"{error.filename}: {error.strerror}")
        return InfraError.exit_code
    except MegadapoError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_KEYBOARD_INTERRUPT


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = parse(build_parser(), argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with the overrides that it has, or refuse what is left over."""
    try:
        arguments, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        # argparse's message names the commands
        name = (sys.argv[1:] if argv is None else argv)[0]
        near = difflib.get_close_matches(name, re.findall(r"'([a-z-]+)'", str(error))[1:], n=1)
        hint = f"did you mean {near[0]}?" if near else "see megadapo --help"
        raise ConfigError(f"{name}: unknown command; {hint}") from None
    for text in rest:
        is_override = text.startswith("--") and "." in text.split("=")[0]
        if not (arguments.takes_overrides and is_override):
            raise ConfigError(f"{text}: unknown argument; see {parser.prog} --help")
    arguments.overrides = rest
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="megadapo",
        description="DAPO training of reasoning models at Megatron scale.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"megadapo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
