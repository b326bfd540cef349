"""`megadapo sft` and `megadapo reward-model`: train on rows of data, or resume such a run."""

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

ABOUT_SFT = """Train on the answers in data.train: rows with messages, or with prompt and response.
The recipe is one of megadapo train; sections about rollouts, rewards and algorithms are not
used."""
ABOUT_REWARD_MODEL = """Train a reward model on the pairs in data.train: rows with prompt, chosen
and rejected. The recipe is one of megadapo train; sections about rollouts, rewards and algorithms
are not used. model.path is a language model, whose new head starts at 0, or a reward model."""


def add(commands: Commands) -> None:
    for name, summary, about in (
        ("sft", "fine-tune a model on answered conversations", ABOUT_SFT),
        ("reward-model", "train a reward model on preference pairs", ABOUT_REWARD_MODEL),
    ):
        parser = add_command(commands, name, summary, takes_overrides=True)
        parser.description = about
        add_config(parser)
        add_start_options(parser)
        parser.set_defaults(run=run, command=name)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.data.sources import read_answered_rows, read_pair_rows

    is_sft = arguments.command == "sft"
    rows = read_answered_rows if is_sft else read_pair_rows
    config, warnings = load_checked(arguments, rows=rows, has_values=not is_sft)

    def start() -> None:
        from megadapo.stages.loop import run_stage
        from megadapo.stages.reward_model import RewardModel
        from megadapo.stages.sft import FineTuning

        run_stage(
            config,
            FineTuning.load(config) if is_sft else RewardModel.load(config),
            accept_changes=arguments.accept_changes,
            allow_fewer=arguments.allow_fewer,
        )

    return start_run(arguments, arguments.command, config, warnings, start)
