"""`megadapo weights plan`: what a weight update of a run would move, before anything is started."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "weights", "what a weight update moves")
    reports = parser.add_subparsers(metavar="REPORT", required=True)
    plan = add_command(
        reports, "plan", "bytes per link and buffers of a run's update", takes_overrides=True
    )
    plan.add_argument("config", type=Path, help="recipe (TOML), or the folder of a run")
    plan.add_argument(
        "--model-config",
        type=Path,
        help="config.json to plan for, where model.path is not at hand",
    )
    plan.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks of a node, colocated (default 8)"
    )
    plan.add_argument("--links", type=int, default=8, help="how many links to list (default 8)")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import load_config
    from megadapo.weights.sync.plan_report import MIB, model_layout, plan_for, report

    config = load_config(arguments.config, arguments.overrides)
    layout = model_layout(config, arguments.model_config)
    started = time.perf_counter()
    plan = plan_for(config, layout, gpus_per_node=arguments.gpus_per_node)
    seconds = time.perf_counter() - started
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    lines = report(plan, layout, bucket_bytes=bucket_bytes, num_links=arguments.links)
    print("\n".join([*lines, f"planned in {seconds:.2f} s"]))
    return 0
