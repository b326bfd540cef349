"""`megadapo doctor`: what this machine has, and what megadapo will make of it."""

from __future__ import annotations

import argparse

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "doctor", "say what this machine has and what megadapo will use")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.observe.doctor import doctor

    return doctor(as_json=arguments.json)
