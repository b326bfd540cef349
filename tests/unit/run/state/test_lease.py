"""One driver per folder: a dead one loses its lease, a living one keeps it."""

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megadapo.errors import InfraError
from megadapo.run.state import lease as lease_module
from megadapo.run.state.lease import LEASE_FILE, Driver, Lease, holder_of
from tests.support.processes.running import wait_until

HEAD = """
import sys, time
from pathlib import Path
from megadapo.errors import InfraError
from megadapo.run.state.lease import Lease
folder = Path(sys.argv[1])
"""
HOLD = """
Lease.take(folder)
print("ready", flush=True)
time.sleep(60)
"""


def write(folder: Path, driver: Driver, *, age_s: float = 0.0) -> None:
    path = folder / LEASE_FILE
    path.write_text(json.dumps(asdict(driver)))
    then = time.time() - age_s
    os.utime(path, (then, then))


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    """Start a driver that takes lines from its input, and wait for its first line of output."""
    command = [sys.executable, "-c", HEAD + script, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def of_another_machine() -> Driver:
    return replace(Driver.here(), host="node-7", machine="another boot", token="theirs")


def test_second_driver_is_refused_with_the_holder(tmp_path):
    lease = Lease.take(tmp_path)
    with pytest.raises(InfraError, match=rf"process {os.getpid()} on "):
        Lease.take(tmp_path)
    lease.check()
    lease.close()
    Lease.take(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_lease_of_killed_driver_is_taken_at_once(tmp_path):
    process = start(HOLD, tmp_path)
    with pytest.raises(InfraError, match=f"process {process.pid} on"):
        Lease.take(tmp_path)
    assert holder_of(tmp_path).pid == process.pid
    process.kill()
    process.communicate()
    assert holder_of(tmp_path) is None
    Lease.take(tmp_path).close()


def test_reused_pid_is_not_the_driver(tmp_path):
    write(tmp_path, replace(Driver.here(), started="1"))
    Lease.take(tmp_path).close()


def test_living_remote_driver_keeps_its_lease(tmp_path):
    write(tmp_path, of_another_machine(), age_s=50)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(Lease.take, tmp_path, stale_s=60)
        time.sleep(0.2)
        assert not second.done()
        os.utime(tmp_path / LEASE_FILE)
        with pytest.raises(InfraError, match="node-7"):
            second.result(timeout=30)


def test_silent_remote_driver_loses_its_lease(tmp_path):
    write(tmp_path, of_another_machine(), age_s=58)
    start = time.monotonic()
    Lease.take(tmp_path, stale_s=60).close()
    assert time.monotonic() - start > 1
    write(tmp_path, of_another_machine(), age_s=50)
    Lease.take(tmp_path, stale_s=40).close()


def test_holder_lives_whatever_this_machines_clock_says(tmp_path, monkeypatch):
    write(tmp_path, of_another_machine())
    for ahead_s in (-7200, 7200):
        now = time.time() + ahead_s
        with monkeypatch.context() as patched:
            patched.setattr(lease_module.time, "time", lambda now=now: now)
            assert holder_of(tmp_path).host == "node-7"
    write(tmp_path, of_another_machine(), age_s=500)
    assert holder_of(tmp_path) is None


def test_lease_in_writing_is_not_taken(tmp_path):
    path = tmp_path / LEASE_FILE
    path.touch()
    with ThreadPoolExecutor() as pool:
        second = pool.submit(Lease.take, tmp_path)
        time.sleep(0.2)
        write(tmp_path, of_another_machine())
        with pytest.raises(InfraError, match="a driver that is starting"):
            second.result(timeout=30)
    os.utime(path, (1, 1))
    Lease.take(tmp_path).close()


def test_heartbeat_touches_the_lease(tmp_path):
    lease = Lease.take(tmp_path, heartbeat_s=0.01)
    os.utime(tmp_path / LEASE_FILE, (1, 1))
    wait_until(lambda: (tmp_path / LEASE_FILE).stat().st_mtime >= 2, timeout_s=10)
    lease.close()


def test_suspended_driver_notices_lost_lease(tmp_path):
    lease = Lease.take(tmp_path)
    write(tmp_path, of_another_machine())
    with pytest.raises(InfraError, match=r"held by process \d+ on node-7"):
        lease.check()
    lease.close()
    assert json.loads((tmp_path / LEASE_FILE).read_text())["token"] == "theirs"


TAKE_TOGETHER = """
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = Lease.take(folder, stale_s=60)
except InfraError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
sys.stdin.readline()
"""


def test_one_of_many_takes_a_stale_lease(tmp_path):
    write(tmp_path, of_another_machine(), age_s=1000)
    processes = [start(TAKE_TOGETHER, tmp_path) for _ in range(6)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate("\n")
    assert sorted(answers) == ["refused\n"] * 5 + ["taken\n"]


def test_lease_of_a_quicker_driver_is_never_away(tmp_path, monkeypatch):
    """It was renamed for a moment, in which a third driver took the run too."""
    path, link, read = tmp_path / LEASE_FILE, os.link, lease_module._read
    write(tmp_path, of_another_machine(), age_s=1000)

    def another_is_quicker(source: Path, target: Path) -> None:
        if target.name.endswith(".dead"):
            path.unlink()
            write(tmp_path, replace(of_another_machine(), token="quicker"))
        link(source, target)

    def read_while_it_is_there(file: Path) -> Driver | None:
        assert path.exists()
        return read(file)

    monkeypatch.setattr(os, "link", another_is_quicker)
    monkeypatch.setattr(lease_module, "_read", read_while_it_is_there)
    monkeypatch.setattr(lease_module, "_is_overdue", lambda path, stale_s: False)
    with pytest.raises(InfraError, match="is driven by"):
        Lease.take(tmp_path, stale_s=60)
    assert json.loads(path.read_text())["token"] == "quicker"
    assert sorted(tmp_path.iterdir()) == [path]


def test_killed_remover_does_not_lock_the_run(tmp_path):
    write(tmp_path, of_another_machine(), age_s=1000)
    os.link(tmp_path / LEASE_FILE, tmp_path / f"{LEASE_FILE}.theirs.dead")
    Lease.take(tmp_path, stale_s=60).close()
    assert not list(tmp_path.iterdir())


def test_unreadable_lease_is_tolerated_for_a_minute(tmp_path, monkeypatch):
    """A file server that fails over ended the run with a traceback."""

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    lease = Lease.take(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(lease_module, "_read", stale)
        lease.check()
        patched.setattr(lease_module, "UNKNOWN_S", 0.0)
        with pytest.raises(InfraError, match="cannot be read for 0 s: Stale"):
            lease.check()
    lease.check()
    lease.close()


def test_link_whose_answer_was_lost_is_ones_own(tmp_path, monkeypatch):
    """A file server repeats the request, and finds the link that it has just made."""
    real = os.link

    def link_twice(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_twice)
    lease = Lease.take(tmp_path)
    lease.check()
    lease.close()


def test_removed_lease_belongs_to_no_other_driver(tmp_path):
    """The driver would not write its end, and status.json would say "running" for ever."""
    lease = Lease.take(tmp_path)
    (tmp_path / LEASE_FILE).unlink()
    assert not lease.is_lost()
    write(tmp_path, replace(Driver.here(), token="another"))
    assert lease.is_lost()
    lease.close()


def test_heartbeat_of_a_lost_lease_does_not_keep_it_fresh(tmp_path):
    lease = Lease.take(tmp_path, heartbeat_s=0.02)
    write(tmp_path, of_another_machine(), age_s=500)
    time.sleep(0.2)
    assert time.time() - (tmp_path / LEASE_FILE).stat().st_mtime > 400
    lease.close()
