"""The guard process: it kills what a killed process leaves behind, and nothing else."""

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from megadapo.cluster.watch.guard import MARK, kill_marked, marked_processes
from tests.support.processes.running import is_running, wait_until

MARKED = """
import os, subprocess, sys, time
from multiprocessing import shared_memory
from megadapo.cluster.watch.guard import mark_and_guard
guard = mark_and_guard(sys.argv[1])
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
def test_nothing_marked_outlives_a_killed_process() -> None:
    """SIGKILL prevents any cleanup of children, grandchildren and shared memory."""
    mark, block = f"test-{os.getpid()}-{time.time_ns()}", f"psm_test{os.getpid()}"
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "another-engine"})
    parent = start(MARKED, mark, block)
    try:
        assert parent.stdout.readline() == "up\n"
        wait_until(lambda: len(marked_processes(mark)) >= 2)
        assert Path("/dev/shm", block).exists()
        parent.kill()
        wait_until(lambda: not marked_processes(mark), timeout_s=20)
        wait_until(lambda: not Path("/dev/shm", block).exists(), timeout_s=5)
        assert bystander.poll() is None
    finally:
        for process in (parent, bystander):
            process.kill()
            process.wait()


@pytest.mark.fault
@pytest.mark.parametrize("ending", ["hangs", "exits"])
def test_listed_processes_are_killed_unless_the_exit_is_orderly(ending: str) -> None:
    parent = start(LISTED, ending)
    pid = int(parent.stdout.readline())
    try:
        if ending == "hangs":
            parent.kill()
            wait_until(lambda: not is_running(pid), timeout_s=20)
        else:
            assert parent.wait(timeout=20) == 0
            # the guard needs GRACE_S = 3 s before it would kill
            time.sleep(4)
            assert is_running(pid)
    finally:
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
