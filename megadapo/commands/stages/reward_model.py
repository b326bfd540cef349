"""`megadapo reward-model`: train a reward model on preference pairs, or resume such a run."""

from __future__ import annotations

import argparse

from megadapo.commands.common import (
    Commands,
    add_command,
    add_config,
    add_start_options,
    load_checked,
    start_run,
)

ABOUT = """Train a reward model on the pairs in data.train: rows with prompt, chosen and rejected.
The recipe is one of megadapo train; sections about rollouts, rewards and algorithms are not used.
model.path is a language model, whose new head starts at 0, or a reward model."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "reward-model", "train a reward model on preference pairs", takes_overrides=True
    )
    parser.description = ABOUT
    add_config(parser)
    add_start_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.data.sources import read_pair_rows

    config, warnings = load_checked(arguments, rows=read_pair_rows, has_values=True)

    def start() -> None:
        from megadapo.stages.loop import run_stage
        from megadapo.stages.reward_model import RewardModel

        run_stage(
            config,
            RewardModel.load(config),
            accept_changes=arguments.accept_changes,
            allow_fewer=arguments.allow_fewer,
        )

    return start_run(arguments, "reward-model", config, warnings, start)
