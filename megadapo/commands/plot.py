"""`megadapo plot`: draw the curves of one or several runs as a PNG."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "plot", "draw the curves of one or several runs in one image")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=Path, help="PNG to write; default: plot.png in RUN")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.observe.plot import PLOT_FILE, plot_runs

    output = arguments.output or arguments.runs[0] / PLOT_FILE
    print(plot_runs(arguments.runs, output))
    return 0
