"""Slow-downs, joins and leaves of engines: they change the schedule of an asynchronous run."""

from __future__ import annotations

import json
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.runs.whole_runs import megadapo

CHANGES = ("slow-down", "join", "leave")
MOST_ENGINES = 3
SHORTEST_S, LONGEST_S = 0.2, 3.0
"""Seconds for which an engine is stopped."""
WITHIN_S = (0, 600)
"""Seconds in which an engine that leaves may finish its groups."""


def change_engines(
    change: str, folder: Path, processes: list[psutil.Process], choose: random.Random
) -> str:
    """Slow an engine of a run down, or let one join or leave; return what was done.

    A join of more than `MOST_ENGINES` is a leave, and the leave of the last one is a join.

    Args:
        processes: the engine to slow down.
    """
    if change == "slow-down":
        lasts_s = choose.uniform(SHORTEST_S, LONGEST_S)
        with suppress(psutil.NoSuchProcess):
            processes[0].send_signal(signal.SIGSTOP)
            time.sleep(lasts_s)
            processes[0].send_signal(signal.SIGCONT)
        return f"for {lasts_s:.1f} s"
    wanted = json.loads(megadapo("engines", folder, "--json").stdout)["wanted"]
    joins = wanted == 1 or (change == "join" and wanted < MOST_ENGINES)
    words = ("--add=1",) if joins else ("--remove=1", f"--within={choose.choice(WITHIN_S)}s")
    return megadapo("engines", folder, *words).stdout.strip()
