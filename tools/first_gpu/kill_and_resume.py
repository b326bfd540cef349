"""Starts a run, kills its driver after the first save, and resumes it.

    python tools/first_gpu/kill_and_resume.py COMMAND...

COMMAND is `megadapo train` with `--run.folder` and a `--checkpoint.every` of several steps before
the last. The exit code is 0 if the resumed run finished with every step once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from runner import end_marked

from megadapo.errors import DataError
from megadapo.observe.metrics.records import METRICS_FILE
from megadapo.run.state.status import Status, read_status

POLL_S = 0.05
KILLED = "MEGADAPO_KILLED"
"""Variable in the environment of the processes of the killed run."""


def main(command: list[str]) -> str | None:
    """Return what went wrong, if anything did."""
    prefix = "--run.folder="
    (folder,) = (Path(word.removeprefix(prefix)) for word in command if word.startswith(prefix))
    mark = str(os.getpid())
    process = subprocess.Popen(command, env=os.environ | {KILLED: mark})
    while not _has_saved(status := _status(folder)):
        if process.poll() is not None:
            return f"the run ended with {process.returncode} before it was killed"
        time.sleep(POLL_S)
    process.kill()
    process.wait()
    assert status is not None
    print(f"killed after step {status.step}, saved at {status.checkpoint_step}", flush=True)
    print(f"{end_marked(mark, KILLED)} processes outlived it by 20 s and were ended", flush=True)
    code = subprocess.run(command).returncode
    if code:
        return f"the resumed run ended with {code}"
    ended = read_status(folder)
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    if steps != list(range(1, ended.num_steps + 1)):
        return f"metrics.jsonl has the steps {steps}"
    if ended.resumed_from < status.checkpoint_step:
        return f"the run resumed from step {ended.resumed_from}"
    print(f"resumed from step {ended.resumed_from} and finished {ended.num_steps} steps")
    return None


def _status(folder: Path) -> Status | None:
    with suppress(DataError):
        return read_status(folder)
    return None


def _has_saved(status: Status | None) -> bool:
    """Return whether the run is in a step after one that it saved."""
    return status is not None and 0 < status.checkpoint_step < status.step + 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
