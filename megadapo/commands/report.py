"""`megadapo report`: write one or several runs as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    summary = "write curves, oracles and saved responses of runs as one HTML file"
    parser = add_command(commands, "report", summary)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="HTML to write; default: report.html in RUN"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.observe.report import REPORT_FILE, write_report

    output = arguments.output or arguments.runs[0] / REPORT_FILE
    print(write_report(arguments.runs, output))
    return 0
