"""Ray is joined only with a token, and its silent and dead daemons are named and left."""

import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megadapo.cluster.local_ray import private_folder
from megadapo.cluster.ray_connection import (
    LEAVE_S,
    LIMIT_S,
    LOST,
    SILENT,
    RayDaemonWatch,
    _own_sigterm_handler,
)
from megadapo.errors import ConfigError, ProcessDiedError, ProcessHungError
from tests.support.processes.running import wait_until


def test_stop_signal_while_ray_starts_reaches_the_program():
    """With Ray's handler alone the run counts as failed, not as stopped."""
    received = []

    def own(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit), _own_sigterm_handler():
            # as ray.init does
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_folder_of_sockets_is_private_and_short(tmp_path, monkeypatch, name):
    """Another user could replace Ray's sockets; a longer path than 107 bytes ends its start."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv(name, str(long))
    if name == "RAY_TMPDIR":
        with pytest.raises(ConfigError, match="RAY_TMPDIR = .* at most 21 bytes"):
            private_folder()
        return
    folder = private_folder()
    try:
        assert folder.parent == Path("/tmp") and stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(folder)


def test_folder_of_a_killed_process_is_removed_by_the_next(monkeypatch):
    """A job that ends by SIGKILL to all its processes would leave a folder on the node each time"""
    parent = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for sockets
    monkeypatch.setenv("RAY_TMPDIR", str(parent))
    program = "from megadapo.cluster.local_ray import private_folder as f; print(f(), flush=True)"
    command = [sys.executable, "-c", f"import time; {program}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        own = private_folder()
        assert left.parent == own.parent == parent and left.is_dir()
        process.kill()
    later = private_folder()
    assert sorted(parent.iterdir()) == sorted([own, later])
    shutil.rmtree(parent)


EVERY_S = LIMIT_S / 4


class Watch(RayDaemonWatch):
    """A watch whose main thread has a scripted position."""

    in_ray = True

    def is_stuck_in_ray(self) -> bool:
        return self.in_ray


def manual_watch(ended: list[str]) -> Watch:
    """Return a watch whose intervals pass only when the test counts them."""
    watch = Watch(lambda: True, ended.append, every_s=3600)
    watch._every_s = EVERY_S
    return watch


def answer(watch: RayDaemonWatch, *, has_node: bool = True) -> None:
    watch._has_node = has_node
    watch._num_answers += 1


def test_silent_service_is_named_and_slow_one_is_not() -> None:
    ended: list[str] = []
    watch = manual_watch(ended)
    for _ in range(3):
        for _ in range(4):
            watch.tick()
            watch.check()
        answer(watch)
        watch.tick()
    assert watch.answers
    for _ in range(5):
        watch.tick()
    with pytest.raises(ProcessHungError, match="gcs_server.* 60 s"):
        watch.check()
    assert ended == [] and not watch.answers


def test_driver_stuck_in_ray_without_its_daemon_is_ended() -> None:
    """Inside Ray the driver waits for a stopped daemon and ignores signals."""
    ended: list[str] = []
    watch = manual_watch(ended)
    for _ in range(5):
        answer(watch, has_node=False)
        watch.tick()
    assert ended == [LOST]
    with pytest.raises(ProcessHungError, match="raylet"):
        watch.check()


def test_dead_daemon_is_named_at_once_and_ends_a_driver_that_waits_for_it() -> None:
    """Ray itself waits a day for a lost control service, and says nothing."""
    ended, dead = list[str](), ["gcs_server"]
    watch = manual_watch(ended)
    watch._lost_daemon = lambda: dead[0]
    watch.tick()
    with pytest.raises(ProcessDiedError, match="gcs_server has ended"):
        watch.check()
    while not ended:
        watch.tick()
        assert watch._stuck_s <= LEAVE_S + EVERY_S < LIMIT_S
    assert "gcs_server has ended" in ended[0]


def test_working_driver_is_never_ended() -> None:
    """A final save needs no daemon, and may take minutes."""
    ended: list[str] = []
    watch = manual_watch(ended)
    watch.in_ray = False
    for _ in range(100):
        watch.tick()
    assert ended == [] and not watch.answers


def test_only_one_unfinished_call_of_ray_counts_as_stuck() -> None:
    watch, gate, seen = RayDaemonWatch(lambda: True, every_s=3600), threading.Lock(), list[bool]()
    wait_in: dict[str, Callable[[threading.Lock], None]] = {}
    for module in ("ray._private.worker", "megadapo.cluster.calls"):
        space = {"__name__": module}
        exec("def wait(gate):\n    gate.acquire()\n    gate.release()", space)
        wait_in[module] = space["wait"]  # type: ignore[assignment]

    def look() -> None:
        time.sleep(0.2)
        watch.is_stuck_in_ray()
        seen.append(watch.is_stuck_in_ray())
        gate.release()

    for module in (*wait_in, "ray._private.worker"):
        gate.acquire()
        looking = threading.Thread(target=look)
        looking.start()
        wait_in[module](gate)
        looking.join()
    assert seen == [True, False, True]


def test_temporary_problem_ends_nothing() -> None:
    ended: list[str] = []
    watch = manual_watch(ended)
    for _ in range(3):
        for _ in range(8):
            watch.tick()
        assert not watch.answers
        answer(watch)
        watch.tick()
        watch.check()
    assert ended == []


def test_threads_ping_and_count() -> None:
    ended: list[str] = []
    pinged, forever = threading.Event(), threading.Event()

    def ping() -> bool:
        pinged.set()
        return forever.wait()

    watch = Watch(ping, ended.append, every_s=0.001)
    watch._silent_s = LIMIT_S
    assert pinged.wait(30)
    wait_until(lambda: not watch.answers)
    watch._stuck_s = LIMIT_S
    wait_until(lambda: bool(ended))
    assert set(ended) == {SILENT}
    watch.close()
    forever.set()
