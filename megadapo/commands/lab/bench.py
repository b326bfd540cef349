"""`megadapo bench`: run a script of benchmarks/ in the checkout of this installation."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = {
    "head": "time, memory and error of the policy head and its baselines",
    "compiled_kernels": "registers and memory of the Triton kernels, compiled without a GPU",
    "weights": "time and memory of a weight update, shard to shard and by gathering full tensors",
    "rollout": "time to a full batch on real engines, in each sampling mode",
    "environments": "speed of an engine whose conversations wait for a slow environment",
    "step": "time of whole training steps, alternating with TRL's",
    "to_accuracy": "seconds of training to a held-out accuracy, alternating with TRL's steps",
    "driver": "time and memory of the driver's own work on a step of the paper's size",
    "soak": "growth of memory and of step time over many steps",
    "published_times": "forecasts beside published step times, and the fit of their constants",
}


def add(commands: Commands) -> None:
    parser = add_command(commands, "bench", "measure against installed baselines")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = (f"  {name:<17}{summary}" for name, summary in SCRIPTS.items())
    parser.epilog = "\n".join(["scripts; megadapo bench NAME --help shows the options:", *listed])
    parser.add_argument("name", choices=SCRIPTS, metavar="NAME", help="script of benchmarks/")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    script = FOLDER / f"{arguments.name}.py"
    if not script.is_file():
        raise ConfigError(
            f"benchmarks/{script.name}: not in this installation. The benchmarks are scripts of "
            f"megadapo's repository: in a checkout, run python benchmarks/{script.name}"
        )
    # the script imports this megadapo, installed or not
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(script), *arguments.options]
    # in place of this process, so that signals reach the script
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
