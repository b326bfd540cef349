"""`megadapo whatif`: other objectives on a batch that a run has saved."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

ABOUT = """Compute the loss and gradient of other objectives on a step's saved groups with the run's
own trainer, before the step's updates and after them. Each --set is one alternative to the run's
own objective; its keys are of [algorithm]. Nothing in the run's folder changes."""


def add(commands: Commands) -> None:
    summary = "compare objectives on a saved step of a run"
    parser = add_command(commands, "whatif", summary, takes_overrides=True)
    parser.description = ABOUT
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="a saved step")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="alternatives",
        metavar="KEY=VALUE[,KEY=VALUE]",
        help="one alternative, as in --set algorithm.objective.clip_high=0.35; may be repeated",
    )
    parser.add_argument(
        "--aggregations", action="store_true", help="every loss aggregation as an alternative"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.lab.whatif.alternatives import all_aggregations, alternatives

    folder: Path = arguments.run_folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not the folder of a run")
    for override in arguments.overrides:
        if override.startswith("--algorithm."):
            raise ConfigError(f"{override}: an alternative is --set {override[2:]}")
    config = load_config(folder, arguments.overrides)
    texts = [*arguments.alternatives, *(all_aggregations(config) if arguments.aggregations else ())]
    chosen = alternatives(config, texts)

    from megadapo.lab.record import write_record
    from megadapo.lab.whatif.compare import compare

    console, found = Console(), []
    remaining = compare(config, arguments.step, chosen)
    while True:
        with console.status("compare objectives"):
            comparison = next(remaining, None)
        if comparison is None:
            break
        found.append(comparison)
        print(comparison.text(), end="\n\n")
    if arguments.json is not None:
        comparisons = [comparison.to_json() for comparison in found]
        results = {"run": str(folder), "step": arguments.step, "comparisons": comparisons}
        write_record(arguments.json, results)
    return 0
