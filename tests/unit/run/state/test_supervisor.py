"""The supervisor: it restarts what a restart can fix, finitely often, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megadapo.cluster.watch.guard import start_time
from megadapo.run.state.supervisor import MAX_FRUITLESS
from tests.support.processes.running import wait_until

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
import sys
from pathlib import Path
from megadapo.run.state.supervisor import Supervisor
folder, restarts, *command = sys.argv[1:]
supervisor = Supervisor(
    command, Path(folder), max_restarts=int(restarts), say=print, first_wait_s=0.01, stale_s=2.0
)
sys.exit(supervisor.run())
"""


def start(folder: Path, driver: str, *, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER + textwrap.dedent(driver), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), str(restarts), *command],
        stdout=subprocess.PIPE,
        text=True,
    )


def supervise(folder: Path, driver: str, *, restarts: int = 5) -> tuple[int, str, list[str]]:
    process = start(folder, driver, restarts=restarts)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, (folder / "starts").read_text().splitlines()


def test_failures_preemption_and_kills_are_restarted(tmp_path):
    code, output, starts = supervise(
        tmp_path,
        """
        resume_and_complete(num)
        if num == 1: sys.exit(5)
        if num == 2: sys.exit(75)
        if num == 3: os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert (code, len(starts)) == (0, 4)
    assert "exit code 5 after step 1; restart 1 of 5" in output and "SIGKILL after step 3" in output


def test_driver_without_heartbeat_is_killed_and_restarted(tmp_path):
    """Only the supervisor can end a stopped driver: its children wait for it."""
    code, output, starts = supervise(
        tmp_path,
        """
        from megadapo.run.state.lease import Lease
        Lease.take(folder, heartbeat_s=0.1)
        if num == 1: os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(4)
        """,
    )
    assert (code, len(starts)) == (0, 2)
    assert "no heartbeat for 2 s" in output and "SIGKILL after step 0" in output


@pytest.mark.parametrize("wrong", [2, 3, 4, 6])
def test_permanent_errors_are_not_restarted(tmp_path, wrong):
    code, output, starts = supervise(tmp_path, f"sys.exit({wrong})")
    assert (code, len(starts)) == (wrong, 1)
    assert f"a restart cannot fix exit code {wrong}" in output


@pytest.mark.parametrize("says", [True, False])
def test_unexpected_end_is_restarted(tmp_path, says):
    """Ray's core ends the process with exit code 1, as Python does after an unforeseen error."""
    _, _, starts = supervise(
        tmp_path,
        f"""
        status = StatusFile(folder, num_steps=9)
        if {says}: status.end(ValueError("no number"))
        os._exit(1 if num == 1 else 2)
        """,
        restarts=1,
    )
    assert len(starts) == 2


def test_closed_terminal_ends_neither_supervisor_nor_driver(tmp_path):
    process = start(
        tmp_path,
        """
        os.kill(os.getppid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        """,
        restarts=0,
    )
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("earlier_step", [None, 5])
def test_restarts_without_progress_are_limited(tmp_path, earlier_step):
    """The progress of an earlier driver is not the new one's."""
    if earlier_step:
        status = {"num_steps": 9, "step": 5, "checkpoint_step": 5, "resumed_from": 0}
        process = {"host": "h", "pid": os.getpid(), "started": "t", "updated": "t"}
        (tmp_path / "status.json").write_text(json.dumps(status | process))
    code, output, starts = supervise(tmp_path, "sys.exit(5)", restarts=50)
    assert (code, starts) == (5, [""] * (1 + MAX_FRUITLESS))
    assert "completed no step" in output


def test_number_of_restarts_is_limited_despite_progress(tmp_path):
    code, output, starts = supervise(
        tmp_path,
        """
        resume_and_complete(num)
        sys.exit(5)
        """,
        restarts=MAX_FRUITLESS + 2,
    )
    assert (code, len(starts)) == (5, MAX_FRUITLESS + 3)
    assert f"the limit of {MAX_FRUITLESS + 2} restarts is reached" in output


def test_resume_option_is_kept_until_the_first_own_checkpoint(tmp_path):
    """--resume PATH after a requeue would throw away what was trained since; --resume auto too
    early would begin from the model's own weights."""
    _, _, starts = supervise(
        tmp_path,
        """
        status = resume_and_complete(5)
        if num >= 2: status.update(checkpoint_step=5)
        sys.exit(5 if num < 4 else 0)
        """,
    )
    assert starts == ["", "", "--run.resume=auto", "--run.resume=auto"]


def test_leftovers_end_before_the_next_start(tmp_path):
    code, _, _ = supervise(
        tmp_path,
        """
        pids = folder / "pids"
        if num == 1:
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"],
                                    start_new_session=True)
            pids.write_text(str(left.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1 if Path(f"/proc/{pids.read_text()}").exists() else 0)
        """,
    )
    assert code == 0


def test_signal_reaches_driver_once_and_ends_supervision(tmp_path):
    process = start(
        tmp_path,
        """
        def stop(number, frame):
            (folder / "stopped").write_text(signal.Signals(number).name)
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        (folder / "ready").write_text(str(os.getpid()))
        time.sleep(60)
        """,
        restarts=5,
    )
    ready = tmp_path / "ready"
    wait_until(lambda: ready.exists() and ready.read_text(), timeout_s=30)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, (tmp_path / "stopped").read_text()) == (75, "SIGTERM")
    assert "it was asked to stop" in output
    assert start_time(int(ready.read_text())) is None
