"""A supervisor ends a hung driver, passes on signals, shows its state, leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any
from unittest.mock import Mock

import pytest

from megadapo.cli import main
from megadapo.cluster.watch.guard import start_time
from megadapo.run.state import supervisor
from megadapo.run.state.lease import Lease
from megadapo.run.state.status import StatusFile, read_status
from megadapo.run.state.stop import STEP_SIGNALS
from megadapo.run.state.supervisor import Supervisor
from tests.support.processes.running import wait_until
from tests.support.processes.supervised import start, supervise


@pytest.mark.slow
def test_driver_without_heartbeat_is_killed_and_restarted(tmp_path):
    """Only the supervisor can end a stopped driver: its children wait for it."""
    code, output, starts = supervise(
        tmp_path,
        """
        from megadapo.run.state.lease import Lease
        Lease.take(folder, heartbeat_s=0.1)
        if num == 1: os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3)
        """,
    )
    assert (code, len(starts)) == (0, 2)
    assert "no heartbeat for 2 s" in output and "SIGKILL after step 0" in output


@pytest.mark.slow
def test_driver_without_progress_writes_its_stacks_and_is_restarted(tmp_path, monkeypatch):
    """Its heartbeat is a thread of its own, so a main thread that waits for ever looked healthy."""
    monkeypatch.setenv("STALL_S", "1.5")
    code, output, starts = supervise(
        tmp_path,
        """
        from megadapo.cluster.process_log import driver_log, stacks_on_quit
        from megadapo.run.state.lease import Lease
        Lease.take(folder, heartbeat_s=0.1)
        if num == 2: sys.exit(0)
        status = resume_and_complete(2)
        for tokens in range(25):
            time.sleep(0.1)
            status.report_progress(0, tokens)
            status._write()
        def wait_for_ever():
            time.sleep(60)
        with stacks_on_quit(driver_log(folder)):
            wait_for_ever()
        """,
    )
    assert (code, len(starts)) == (0, 2)
    assert "no progress for 0:00:" in output
    assert "SIGKILL after step 2; restart 1 of 5" in output
    assert "in wait_for_ever" in (tmp_path / "logs" / "driver.log").read_text()


def test_driver_that_never_reaches_the_run_is_restarted(tmp_path, monkeypatch):
    """A mount that hangs, or an import, was waited for without end."""
    monkeypatch.setenv("STALL_S", "1.5")
    code, output, starts = supervise(tmp_path, "if num == 1: time.sleep(60)")
    assert (code, len(starts)) == (0, 2)
    assert "no progress for" in output


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


def test_status_says_what_the_supervisor_waits_for(tmp_path, capsys):
    process = start(
        tmp_path,
        """
        status = resume_and_complete(4)
        status.end(RuntimeError("no node offers a GPU"))
        sys.exit(5)
        """,
        restarts=5,
        first_wait_s=60,
    )
    wait_until(lambda: "in 60 s" in process.stdout.readline(), timeout_s=30)
    wait_until(lambda: read_status(tmp_path).state == "waiting", timeout_s=10)
    assert main(["status", str(tmp_path), "--json"]) == 1
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["reason"]) == ("waiting", "RuntimeError: no node offers a GPU")
    until, updated = (datetime.fromisoformat(status[k]) for k in ("waits_until", "updated"))
    assert 58 <= (until - updated).total_seconds() <= 61
    os.utime(tmp_path / "status.json", (1, 1))
    main(["status", str(tmp_path)])
    assert "the supervisor is dead" in capsys.readouterr().out
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    status = read_status(tmp_path)
    assert status.state == "stopped" and status.waits_until is None
    assert (
        status.reason == "RuntimeError: no node offers a GPU; not restarted: it was asked to stop"
    )


def test_stop_file_ends_the_wait(tmp_path):
    process = start(tmp_path, "sys.exit(5)", restarts=5, first_wait_s=60)
    wait_until(lambda: "in 60 s" in process.stdout.readline(), timeout_s=30)
    (tmp_path / "stop").write_text("restart: a node ends")
    wait_until(lambda: not (tmp_path / "stop").exists(), timeout_s=30)
    time.sleep(0.5)
    assert process.poll() is None
    (tmp_path / "stop").touch()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, "it was asked to stop" in output) == (5, True)


def test_run_that_must_stay_stopped_is_not_restarted(tmp_path):
    code, output, starts = supervise(
        tmp_path,
        """
        from megadapo.errors import RunInterruptedError
        error = RunInterruptedError("stopped by the file stop")
        resume_and_complete(num).end(error, stays_stopped=num == 2)
        sys.exit(75)
        """,
    )
    assert (code, len(starts)) == (75, 2)


def test_signals_for_a_step_reach_a_driver_that_starts(tmp_path):
    """Python has no handler for them before the run is open, and the default ends the process."""
    process = start(
        tmp_path,
        """
        from megadapo.run.state.stop import StopSignal
        (folder / "ready").touch()
        while not (folder / "sent").exists(): time.sleep(0.05)
        stop = StopSignal()
        stop.install()
        (folder / "asked").write_text(" ".join(str(n) for n in sorted(stop._asked)))
        """,
        restarts=0,
    )
    wait_until(lambda: (tmp_path / "ready").exists(), timeout_s=30)
    for number in STEP_SIGNALS:
        process.send_signal(number)
    time.sleep(0.5)
    (tmp_path / "sent").touch()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "asked").read_text() == f"{STEP_SIGNALS[0]:d} {STEP_SIGNALS[1]:d}"


def test_signal_reaches_a_driver_that_is_being_started(tmp_path, monkeypatch):
    """A supervisor that was asked to stop let its next driver train to the end."""
    waiting = Supervisor(["sleep", "60"], tmp_path, max_restarts=1, say=print)
    popen = subprocess.Popen

    def start_late(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        waiting._forward(signal.SIGTERM, None)
        return popen(*command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    monkeypatch.setattr(supervisor, "_end_leftovers", lambda: None)
    assert waiting._start().code == -signal.SIGTERM


def test_status_of_another_driver_is_left_alone(tmp_path):
    """The one whose lease a start met is alive, and writes its own status."""
    lease = Lease.take(tmp_path)
    StatusFile(tmp_path, num_steps=9).update(step=3)
    supervise(tmp_path, "sys.exit(5)", give_up_after_s=0.1)
    lease.close()
    status = read_status(tmp_path)
    assert (status.state, status.reason, status.pid) == ("running", None, os.getpid())


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_status_of_a_driver_with_the_same_pid_is_left_alone(tmp_path, monkeypatch, host):
    """Containers give the same pids: a run that was stopped before was not started again."""
    status = replace(StatusFile(tmp_path, num_steps=9).current, stays_stopped=True, host=host)
    if host != "another":
        (tmp_path / "status.json").write_text(json.dumps(asdict(status)))
    driver = Mock(pid=os.getpid())
    driver.wait.return_value = 5

    def begin(*command: Any, **options: Any) -> Mock:
        # another container's driver may write while this one starts
        (tmp_path / "status.json").write_text(json.dumps(asdict(status)))
        return driver

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(supervisor, "_end_leftovers", lambda: None)
    end = Supervisor(["train"], tmp_path, max_restarts=1, say=print)._start()
    assert end.reason == "exit code 5 before it reached the run" and not end.stays_stopped


def test_supervisor_suspended_with_its_driver_kills_nothing(tmp_path):
    """The driver's heartbeat was as old as the pause, and the supervisor was often awake first."""
    process = start(
        tmp_path,
        """
        from megadapo.run.state.lease import Lease
        lease = Lease.take(folder, heartbeat_s=0.1)
        (folder / "ready").write_text(str(os.getpid()))
        while not (folder / "go").exists(): time.sleep(0.05)
        lease.close()
        """,
        restarts=0,
    )
    wait_until(lambda: (tmp_path / "ready").exists(), timeout_s=30)
    driver = int((tmp_path / "ready").read_text())
    os.kill(driver, signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.2)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    os.kill(driver, signal.SIGCONT)
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")


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
