"""`megadapo status`: print a run's progress and whether its driver is alive."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "status", "print the progress of a run")
    parser.description = (
        "Print a run's status.json. Exit code: 0 if the run is running or finished, 1 if it was "
        "stopped, failed, or its driver is gone."
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.run.state.lease import holder_of
    from megadapo.run.state.status import read_status

    status = asdict(read_status(arguments.run_folder))
    if status["state"] == "running" and holder_of(arguments.run_folder) is None:
        status |= {"state": "gone", "reason": "the driver is dead, perhaps killed"}
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        for name, value in status.items():
            print(f"{name.replace('_', ' '):17}{'-' if value is None else value}")
    return 0 if status["state"] in ("running", "finished") else 1
