"""`megadapo plot` and `megadapo report`: draw one or several runs as a PNG or an HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    plot = add_command(commands, "plot", "draw the curves of one or several runs in one image")
    plot.add_argument("--output", type=Path, help="PNG to write; default: plot.png in RUN")
    plot.set_defaults(run=run_plot)
    summary = "write curves, oracles and saved responses of runs as one HTML file"
    report = add_command(commands, "report", summary)
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="HTML to write; default: report.html in RUN"
    )
    report.set_defaults(run=run_report)
    for parser in (plot, report):
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")


def run_plot(arguments: argparse.Namespace) -> int:
    from megadapo.observe.plot import PLOT_FILE, plot_runs

    output = arguments.output or arguments.runs[0] / PLOT_FILE
    print(plot_runs(arguments.runs, output))
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    from megadapo.observe.report.page import REPORT_FILE, write_report

    output = arguments.output or arguments.runs[0] / REPORT_FILE
    print(write_report(arguments.runs, output))
    return 0
