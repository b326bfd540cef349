"""`megadapo show`: what the model wrote in a step, with rewards and verdicts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megadapo.commands.common import Commands, add_command

FATES = ("trained", "to_reserve", "dropped", "all_correct", "all_wrong", "out_of_band")
"""observe.saved_group.Disposition, which would take numpy to --help."""


def add(commands: Commands) -> None:
    parser = add_command(commands, "show", "print the saved responses of a step")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("step", nargs="?", type=int, metavar="STEP", help="default: the last saved")
    verdict = parser.add_mutually_exclusive_group()
    verdict.add_argument("--wrong", action="store_true", help="only wrong responses")
    verdict.add_argument("--correct", action="store_true", help="only right responses")
    parser.add_argument(
        "--truncated", action="store_true", help="only responses cut at the length limit"
    )
    parser.add_argument(
        "--disagreed",
        action="store_true",
        help="only responses on which rule and symbolic comparison differ",
    )
    parser.add_argument("--prompt", metavar="ID", help="only prompts whose id begins like this")
    parser.add_argument("--fate", choices=FATES, help="only groups that this became of")
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="most groups to print; default: 20"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.observe.rollouts.show import Filter, show_step

    # colours go through, and what fits on a screen ends by itself
    os.environ.setdefault("LESS", "-RFX")
    wanted = Filter(
        fate=arguments.fate,
        prompt=arguments.prompt,
        correct=True if arguments.correct else False if arguments.wrong else None,
        truncated=arguments.truncated,
        disagreed=arguments.disagreed,
    )
    show_step(
        arguments.run_folder,
        arguments.step,
        wanted,
        limit=arguments.limit,
        console=Console(highlight=False),
    )
    return 0
