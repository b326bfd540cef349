"""`megadapo eval`: score a run's newest checkpoint, or a model, on held-out problems."""

from __future__ import annotations

import argparse

from megadapo.commands.common import Commands, add_command, add_config, load_checked


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "eval", "score a run or a model on held-out problems", takes_overrides=True
    )
    add_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config, _ = load_checked(arguments)
    from megadapo.run.evaluate import evaluate_policy

    evaluate_policy(config)
    return 0
