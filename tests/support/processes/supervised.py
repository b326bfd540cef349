"""Supervisors of drivers that are a few lines of Python."""

import subprocess
import sys
import textwrap
from pathlib import Path

DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from megadapo.run.state.status import StatusFile
folder = Path(sys.argv[1])
starts = folder / "starts"
starts.open("a").write(" ".join(sys.argv[2:]) + "\\n")
num = len(starts.read_text().splitlines())
def resume_and_complete(step):
    status = StatusFile(folder, num_steps=9)
    status.update(step=step - 1, checkpoint_step=step - 1, resumed_from=step - 1)
    status.update(step=step)
    return status
"""
SUPERVISOR = """
import os, sys
from pathlib import Path
from megadapo.run.state.supervisor import Supervisor
folder, restarts, give_up_after, first_wait, *command = sys.argv[1:]
supervisor = Supervisor(
    command,
    Path(folder),
    max_restarts=int(restarts),
    say=lambda line: print(line, flush=True),
    give_up_after_s=float(give_up_after),
    first_wait_s=float(first_wait),
    stale_s=2.0,
    stall_s=float(os.environ.get("STALL_S", "60")),
    on_event=os.environ.get("ON_EVENT"),
)
sys.exit(supervisor.run())
"""


def start(
    folder: Path, driver: str, *, restarts: int, give_up_after_s: float = 60, first_wait_s=0.01
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER + textwrap.dedent(driver), str(folder)]
    limits = map(str, (restarts, give_up_after_s, first_wait_s))
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), *limits, *command],
        stdout=subprocess.PIPE,
        text=True,
    )


def supervise(
    folder: Path, driver: str, *, restarts: int = 5, give_up_after_s: float = 60
) -> tuple[int, str, list[str]]:
    process = start(folder, driver, restarts=restarts, give_up_after_s=give_up_after_s)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, (folder / "starts").read_text().splitlines()
