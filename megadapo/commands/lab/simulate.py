"""`megadapo simulate`: compare sampling modes on a virtual clock."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.commands.plan import DEFAULT_GPU, add_gpu, card_of
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.lab.simulate.simulation import Assumptions
    from megadapo.lab.simulate.step_times import Absence
    from megadapo.lab.simulate.task import TaskSettings


def add(commands: Commands) -> None:
    summary = "simulate the sampling modes on a virtual clock, without engines"
    parser = add_command(commands, "simulate", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument("--engines", type=int, metavar="N", help="engines (default: the recipe's)")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE|RUN",
        help="response lengths, one a line, or a run's; default: a mean of 0.23 x the limit",
    )
    parser.add_argument(
        "--fit", type=Path, metavar="RUN", help="take speed, lengths and keep rate from a run"
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
        "--gpus", type=int, metavar="N", help="compare whole steps with their training on N GPUs"
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
    add_gpu(parser, purpose="GPU of --gpus")
    parser.add_argument(
        "--away",
        type=_absence,
        metavar="N:SECONDS",
        help="engines that leave after the first measured step, and when they return",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run, gpu=None)  # without --gpus a named GPU is refused


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import load_config
    from megadapo.lab.simulate.fit import fit_run
    from megadapo.lab.simulate.simulation import Assumptions, fit_table

    config = load_config(arguments.config, arguments.overrides)
    fit = fit_run(arguments.fit) if arguments.fit else None
    if fit is not None:
        print(fit_table(fit), end="\n\n")
    assumptions = Assumptions.of(
        config,
        fit,
        num_engines=arguments.engines,
        lengths=arguments.lengths,
        keep_rate=arguments.keep_rate,
        solved_share=arguments.solved,
    )
    if arguments.gpus is None:
        _compare_batches(arguments, assumptions)
    else:
        _compare_steps(arguments, config, assumptions.task)
    return 0


def _compare_batches(arguments: argparse.Namespace, assumptions: Assumptions) -> None:
    """Compare the time until a batch is full, with the baselines' rules."""
    from rich.console import Console

    from megadapo.lab.simulate.simulation import compare, results_table, write_json

    for name in ("trainer_gpus", "staleness", "gpu", "away"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --gpus")
    with Console().status("simulating"):
        results = compare(assumptions, num_steps=arguments.steps, num_seeds=arguments.seeds)
    print(results_table(results, assumptions.title))
    if arguments.json is not None:
        write_json(results, assumptions, arguments.json)


def _compare_steps(arguments: argparse.Namespace, config: RunConfig, task: TaskSettings) -> None:
    """Compare whole steps of all modes on equally many GPUs."""
    from rich.console import Console

    from megadapo.lab.simulate.step_times import (
        ClusterAssumptions,
        compare_steps,
        step_table,
        write_step_json,
    )
    from megadapo.plan.phases import models_of

    for name, default in (("engines", None), ("fit", None), ("seeds", 1)):
        if getattr(arguments, name) != default:
            raise ConfigError(f"--{name} has no effect with --gpus: leave one of them out")
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: must be at least 1")
    if arguments.away is not None and arguments.steps < 2:
        raise ConfigError("--away needs --steps 2 or more: engines leave after the first step")
    if arguments.staleness is not None and arguments.staleness < 2:
        raise ConfigError(f"--staleness {arguments.staleness}: async needs at least 2")
    assumptions = ClusterAssumptions.of(
        config,
        models_of(config).policy,
        card_of(arguments.gpu or DEFAULT_GPU),
        task,
        num_gpus=arguments.gpus,
        num_trainer_gpus=arguments.trainer_gpus,
        staleness=arguments.staleness,
    )
    with Console().status("simulating"):
        results = compare_steps(assumptions, num_steps=arguments.steps, absence=arguments.away)
    print(step_table(results, assumptions.title))
    if arguments.json is not None:
        write_step_json(results, assumptions, arguments.json)


def _absence(text: str) -> Absence:
    from megadapo.lab.simulate.step_times import Absence

    number, _, seconds = text.partition(":")
    return Absence(num_engines=int(number), seconds=float(seconds))
