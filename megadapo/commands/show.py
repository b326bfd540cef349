"""`megadapo show`: print the saved responses of a step with their scores."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megadapo.commands.common import Commands, add_command

DISPOSITIONS = (
    *("trained", "to_reserve", "dropped", "all_correct", "all_wrong", "out_of_band", "equal"),
    "held_out",
)
"""Values of observe.rollouts.saved_group.Disposition, repeated since its import needs numpy."""


def add(commands: Commands) -> None:
    parser = add_command(commands, "show", "print the saved responses of a step")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("step", nargs="?", type=int, metavar="STEP", help="default: the last saved")
    parser.add_argument(
        "--held-out", action="store_true", help="the evaluation after the step: its first problems"
    )
    verdict = parser.add_mutually_exclusive_group()
    verdict.add_argument("--wrong", action="store_true", help="only wrong responses")
    verdict.add_argument("--correct", action="store_true", help="only correct responses")
    parser.add_argument(
        "--truncated", action="store_true", help="only responses cut at the length limit"
    )
    parser.add_argument(
        "--disagreed",
        action="store_true",
        help="only responses on which the rule and the symbolic comparison differ",
    )
    parser.add_argument("--prompt", metavar="ID", help="only prompts whose id starts with ID")
    parser.add_argument(
        "--fate", dest="disposition", choices=DISPOSITIONS, help="only groups with this outcome"
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="most groups to print; default: 20"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.observe.rollouts.show import Filter, show_step

    # keep colours, and exit if the text fits on one screen
    os.environ.setdefault("LESS", "-RFX")
    wanted = Filter(
        disposition=arguments.disposition,
        prompt=arguments.prompt,
        correct=True if arguments.correct else False if arguments.wrong else None,
        truncated=arguments.truncated,
        disagreed=arguments.disagreed,
    )
    show_step(
        arguments.run_folder,
        arguments.step,
        wanted,
        held_out=arguments.held_out,
        limit=arguments.limit,
        console=Console(highlight=False),
    )
    return 0
