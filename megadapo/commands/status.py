"""`megadapo status`: print a run's progress and whether its driver is alive."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from megadapo.commands.common import Commands, add_command
from megadapo.errors import DataError
from megadapo.observe.tables import printable

TAIL_BYTES = 1 << 20
"""Size of the end of metrics.jsonl and log.txt that is read: some 200 steps."""


def add(commands: Commands) -> None:
    parser = add_command(commands, "status", "print the progress of a run")
    parser.description = (
        "Print a run's status.json, and warnings about what it learns. Exit code: 0 if the run is "
        "running or finished, 1 if its supervisor waits to start it again, it was stopped, it "
        "failed, it makes no progress, or its driver is gone."
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.observe.run_records import RunRecords

    folder: Path = arguments.run_folder
    status = observed_status(folder)
    try:
        warnings = RunRecords(folder, last_bytes=TAIL_BYTES).warnings
    except (DataError, OSError) as error:
        # the state does not depend on them
        warnings = [str(error)]
    text = json.dumps({**status, "warnings": warnings}, indent=2)
    if not arguments.json:
        engines = status.pop("engines")
        status["engines"] = None if engines is None else len(engines["engines"])
        text = "\n".join(
            f"{name.replace('_', ' '):17}{'-' if value is None else printable(str(value))}"
            for name, value in (*status.items(), *(("warning", one) for one in warnings))
        )
    # a reader of the first line alone does not change the exit code
    with suppress(BrokenPipeError):
        print(text)
    return 0 if status["state"] in ("running", "finished") else 1


def observed_status(folder: Path) -> dict[str, Any]:
    """Return a run's status, corrected for processes that died without writing it."""
    from megadapo.run.state.lease import STALE_S, age_s, holder_of
    from megadapo.run.state.status import STATUS_FILE, read_status

    status = read_status(folder)
    changes: dict[str, str] = {}
    # the file is written at each progress
    still_s = age_s(folder / STATUS_FILE)
    if status.state == "running" and holder_of(folder) is None:
        changes = {"state": "gone", "reason": "the driver is dead, perhaps killed"}
    elif status.state == "running" and still_s > status.stall_limit_s():
        reason = f"no progress for {timedelta(seconds=round(still_s))}"
        changes = {"state": "stalled", "reason": reason}
    elif status.state == "waiting" and status.waits_until is not None:
        # both times are of the supervisor's clock
        until, updated = map(datetime.fromisoformat, (status.waits_until, status.updated))
        late_s = still_s - (until - updated).total_seconds()
        if late_s > STALE_S and holder_of(folder) is None:
            reason = f"the supervisor is dead, perhaps killed. Last driver: {status.reason}"
            changes = {"state": "gone", "reason": reason}
    return asdict(status) | changes
