"""`megadapo simulate`: compare sampling modes on a virtual clock."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    summary = "simulate the sampling modes on a virtual clock, without engines"
    parser = add_command(commands, "simulate", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument("--engines", type=int, metavar="N", help="engines (default: the recipe's)")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE|RUN",
        help="response lengths, one a line, or a run's; default: mean 4,800, 95%% below 12,000",
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.lab.simulate.fit import fit_run
    from megadapo.lab.simulate.simulation import (
        Assumptions,
        compare,
        fit_table,
        results_table,
        write_json,
    )

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
    with Console().status("simulating"):
        results = compare(assumptions, num_steps=arguments.steps, num_seeds=arguments.seeds)
    print(results_table(results, assumptions.title))
    if arguments.json is not None:
        write_json(results, assumptions, arguments.json)
    return 0
