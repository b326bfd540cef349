"""The guard kills what a killed process leaves behind, and heartbeats name a hung process."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from megadapo.cluster.watch import heartbeat
from megadapo.cluster.watch.guard import MARK, kill_marked, marked_processes
from megadapo.cluster.watch.heartbeat import (
    Heartbeat,
    HeartbeatSender,
    HeartbeatWatch,
    all_alive,
    read_heartbeat,
)
from megadapo.errors import ProcessHungError
from tests.support.processes.running import is_running, wait_until

MARKED = """
import os, subprocess, sys, time
from multiprocessing import shared_memory
from megadapo.cluster.watch.guard import mark_and_guard
guard = mark_and_guard(sys.argv[1], sys.argv[3])
child = "import subprocess, sys, time; from multiprocessing import shared_memory, resource_tracker;"
child += "b = shared_memory.SharedMemory(create=True, size=4096, name=sys.argv[1]);"
child += "resource_tracker.unregister(b._name, 'shared_memory');"
child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
child += " start_new_session=True); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[2]])
time.sleep(600)
"""
LISTED = """
import subprocess, sys, time
from megadapo.cluster.watch import guard
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
guard.kill_after_this_process([child.pid])
print(child.pid, flush=True)
if sys.argv[1] == "hangs":
    time.sleep(600)
"""


def start(source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.fault
def test_nothing_marked_outlives_a_killed_process(tmp_path: Path) -> None:
    """SIGKILL prevents any cleanup of children, grandchildren, shared memory and folders."""
    mark, block = f"test-{os.getpid()}-{time.time_ns()}", f"psm_test{os.getpid()}"
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "another-engine"})
    sockets = tmp_path / "sockets"
    (sockets / "ray").mkdir(parents=True)
    parent = start(MARKED, mark, block, str(sockets))
    try:
        assert parent.stdout.readline() == "up\n"
        wait_until(lambda: len(marked_processes(mark)) >= 2)
        assert Path("/dev/shm", block).exists()
        parent.kill()
        wait_until(lambda: not marked_processes(mark), timeout_s=20)
        wait_until(lambda: not Path("/dev/shm", block).exists(), timeout_s=5)
        wait_until(lambda: not sockets.exists(), timeout_s=5)
        assert bystander.poll() is None
    finally:
        for process in (parent, bystander):
            process.kill()
            process.wait()


@pytest.mark.fault
def test_listed_processes_are_killed_unless_the_exit_is_orderly() -> None:
    hanging, exiting = parents = [start(LISTED, ending) for ending in ("hangs", "exits")]
    lost, left = [int(parent.stdout.readline()) for parent in parents]
    try:
        assert exiting.wait(timeout=20) == 0
        hanging.kill()
        # the guards need GRACE_S = 3 s before they kill
        wait_until(lambda: not is_running(lost), timeout_s=20)
        time.sleep(1)
        assert is_running(left)
    finally:
        for parent, pid in zip(parents, (lost, left), strict=True):
            parent.kill()
            parent.wait()
            if is_running(pid):
                os.kill(pid, 9)


def test_kill_marked_spares_the_caller_and_unmarked_shared_memory() -> None:
    mark = f"test-{os.getpid()}-{time.time_ns()}"
    block = shared_memory.SharedMemory(create=True, size=64)
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark})
    try:
        kill_marked(mark)
        assert child.wait(timeout=10) == -9
        assert Path("/dev/shm", block.name).exists()
    finally:
        block.close()
        block.unlink()


LIMIT_S = 60.0


class Ranks:
    """Two processes with scripted heartbeats, and a clock under the test's control."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.last = {"rank 0": Heartbeat(), "rank 1": Heartbeat()}
        self._paths = [folder / f"{name}.heartbeat" for name in self.last]
        self.watch = HeartbeatWatch(
            list(self.last),
            self._paths,
            [folder / f"{name}.log" for name in self.last],
            with_progress=["update"],
            limit_s=LIMIT_S,
            limit="some.key",
            clock=lambda: self.now,
        )

    def run(self, seconds: float, *, dead: str = "", busy: tuple[str, ...] = ()) -> None:
        """Send heartbeats and check every 2 s; busy ranks report progress each time."""
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            for (name, last), path in zip(self.last.items(), self._paths, strict=True):
                fields = asdict(last)
                fields["count"] += name != dead
                fields["progress"] += name in busy
                self.last[name] = Heartbeat(**fields)
                path.write_text(json.dumps(fields))
            self.watch.check()

    def set(self, **fields: object) -> None:
        self.last = {name: Heartbeat(**asdict(one) | fields) for name, one in self.last.items()}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_silent_process_is_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3 * LIMIT_S)
    ranks.set(doing="update")
    ranks.run(10, busy=("rank 0", "rank 1"))
    with pytest.raises(ProcessHungError) as caught:
        ranks.run(LIMIT_S + 4, dead="rank 1")
    assert str(caught.value) == (
        f"rank 1 sent no heartbeat for 60 s in update (some.key); stacks: {tmp_path}/rank 1.log"
    )


def test_process_furthest_behind_is_named(ranks: Ranks) -> None:
    ranks.set(doing="update")
    ranks.run(10, busy=("rank 0", "rank 1"))
    ranks.run(10, busy=("rank 0",))
    with pytest.raises(ProcessHungError, match="^rank 1 made no progress for 60 s in update"):
        ranks.run(LIMIT_S + 4)


def test_all_are_named_if_none_is_behind(ranks: Ranks) -> None:
    ranks.set(doing="update")
    with pytest.raises(ProcessHungError, match="^rank 0, rank 1 made no progress"):
        ranks.run(LIMIT_S + 4)


def test_limit_grows_to_ten_times_the_slowest_progress(ranks: Ranks) -> None:
    ranks.set(doing="update", slowest_s=30.0)
    ranks.run(290)
    with pytest.raises(ProcessHungError, match="for 300 s"):
        ranks.run(20)


@pytest.mark.parametrize("doing", ["load", ""])
def test_calls_without_progress_and_idle_processes_have_no_limit(ranks: Ranks, doing: str) -> None:
    ranks.set(doing=doing)
    ranks.run(3 * LIMIT_S)


def test_suspended_reader_blames_no_process(ranks: Ranks) -> None:
    ranks.set(doing="update")
    ranks.run(10, busy=("rank 0", "rank 1"))
    ranks.now += 100 * LIMIT_S
    ranks.watch.check()
    ranks.run(LIMIT_S / 2)


def test_process_without_readable_heartbeat_is_named(tmp_path: Path) -> None:
    """A node may see another folder under the run's path."""
    now = [0.0]
    paths = [tmp_path / "none.heartbeat"]
    limits = {"with_progress": [], "limit_s": LIMIT_S, "limit": "key", "clock": lambda: now[0]}
    watch = HeartbeatWatch(["rank 0"], paths, paths, **limits)
    with pytest.raises(ProcessHungError, match="rank 0 sent no heartbeat"):
        for _ in range(40):
            now[0] += 2.0
            watch.check()


def test_sender_writes_work_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "rank.heartbeat"
    path.write_text("x" * 1000)
    sender = HeartbeatSender(path, limit_s=0.04)

    def last() -> Heartbeat:
        return read_heartbeat(path) or Heartbeat()

    with sender.working_on("update"):
        for _ in range(3):
            sender.report_progress()
            time.sleep(0.05)
        wait_until(lambda: last().progress == 3 and last().doing == "update")
    wait_until(lambda: last().doing == "" and last().count > 3)
    with sender.working_on("update"):
        assert sender.heartbeat().slowest_s > 0.04
    with sender.working_on("logprobs"):
        assert sender.heartbeat().slowest_s == 0.0


def test_hung_process_is_told_from_busy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a save waits for a stopped rank until its deadline."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.5)
    busy, stopped = tmp_path / "busy", tmp_path / "stopped"
    with HeartbeatSender(busy, limit_s=0.4).working_on("begin_save"):
        assert all_alive([busy])
        stopped.write_text(json.dumps(asdict(Heartbeat(count=7))))
        assert not all_alive([busy, stopped])


def test_progress_may_be_reported_without_a_sender() -> None:
    heartbeat.report_progress()
    with heartbeat.working_on("update"):
        heartbeat.report_progress()
