"""`megadapo diff`: find the first step, phase and place in which two runs part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "diff", "find where two runs part")
    parser.description = (
        "Compare two runs step by step, and print the first phase, group, token or tensor in which "
        "they differ. Exit code: 0 if they are equal, 1 if they differ."
    )
    for name in ("A", "B"):
        parser.add_argument(f"run_{name.lower()}", type=Path, metavar=name, help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.lab.diff.compare import compare_runs, text_of_comparison

    result = compare_runs(arguments.run_a, arguments.run_b)
    if arguments.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        print(text_of_comparison(result))
    return 0 if result.first is None else 1
