"""`megadapo sft`: fine-tune a model on answered conversations, or resume such a run."""

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

ABOUT = """Train on the answers in data.train: rows with messages, or with prompt and response. The
recipe is one of megadapo train; sections about rollouts, rewards and algorithms are not used."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "sft", "fine-tune a model on answered conversations", takes_overrides=True
    )
    parser.description = ABOUT
    add_config(parser)
    add_start_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.data.sources import read_answered_rows

    config, warnings = load_checked(arguments, rows=read_answered_rows)

    def start() -> None:
        from megadapo.stages.loop import run_stage
        from megadapo.stages.sft import FineTuning

        run_stage(
            config,
            FineTuning.load(config),
            accept_changes=arguments.accept_changes,
            allow_fewer=arguments.allow_fewer,
        )

    return start_run(arguments, "sft", config, warnings, start)
