"""`megadapo simulate`: compare sampling modes on a virtual clock."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.commands.plan import add_gpu, card_of
from megadapo.errors import ConfigError


def add(commands: Commands) -> None:
    summary = "simulate the sampling modes on a virtual clock, without engines"
    parser = add_command(commands, "simulate", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE|RUN",
        help="response lengths, one a line, or a run's; default: a mean of 0.23 x the limit",
    )
    parser.add_argument(
        "--keep-rate", type=float, metavar="SHARE", help="share of mixed groups (default 0.35)"
    )
    parser.add_argument(
        "--solved", type=float, metavar="SHARE", help="share of prompts that are always solved"
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="measured steps (default 4)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds from run.seed on (default 1)"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of engines and trainer (default: the recipe's)"
    )
    parser.add_argument(
        "--trainer-gpus",
        type=int,
        metavar="N",
        help="the trainer's share where engines have GPUs of their own (default: the plan's)",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        metavar="K",
        help="sampling.max_staleness of partial and async (default: the recipe's, at least 2)",
    )
    add_gpu(parser, purpose="their kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.lab.simulate.policies import policies_on_gpus
    from megadapo.lab.simulate.simulation import (
        compare,
        results_table,
        task_of,
        write_json,
    )

    if arguments.staleness is not None and arguments.staleness < 2:
        raise ConfigError(f"--staleness {arguments.staleness}: async needs at least 2")
    config = load_config(arguments.config, arguments.overrides)
    task = task_of(
        config,
        lengths=arguments.lengths,
        keep_rate=arguments.keep_rate,
        solved_share=arguments.solved,
    )
    card = card_of(arguments.gpu)
    policies = policies_on_gpus(
        config,
        card,
        task,
        arguments.gpus,
        num_trainer_gpus=arguments.trainer_gpus,
        staleness=arguments.staleness,
    )
    with Console().status("simulating"):
        results = compare(policies, task, num_steps=arguments.steps, num_seeds=arguments.seeds)
    print(
        results_table(
            results,
            f"{config.sampling.prompts_per_step} groups of {config.sampling.responses_per_prompt} "
            f"on {card.name}, {task.keep_rate:.0%} of groups mixed",
        )
    )
    if arguments.json is not None:
        write_json(results, policies, task, arguments.json)
    return 0
