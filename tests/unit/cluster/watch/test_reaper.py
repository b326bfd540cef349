import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from megadapo.cluster.watch.reaper import MARK, kill_marked, marked_processes

PARENT = """
import os, subprocess, sys, time
from multiprocessing import shared_memory
from megadapo.cluster.watch.reaper import start_reaper
watch = start_reaper(sys.argv[1])
child = "import subprocess, sys, time; from multiprocessing import shared_memory, resource_tracker;"
child += "b = shared_memory.SharedMemory(create=True, size=4096, name=sys.argv[1]);"
child += "resource_tracker.unregister(b._name, 'shared_memory');"
child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
child += " start_new_session=True); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[2]])
time.sleep(600)
"""


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.fault
def test_nothing_outlives_a_killed_parent():
    """SIGKILL gives the parent no chance to clean up: children, grandchildren, shared memory."""
    mark, block = f"test-{os.getpid()}-{time.time_ns()}", f"psm_test{os.getpid()}"
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "another-engine"})
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, mark, block], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout.readline() == "up\n"
        assert wait_until(lambda: len(marked_processes(mark)) >= 2, 20)
        assert Path("/dev/shm", block).exists()
        parent.kill()
        assert wait_until(lambda: not marked_processes(mark), 20)
        assert wait_until(lambda: not Path("/dev/shm", block).exists(), 5)
        assert bystander.poll() is None
    finally:
        parent.kill()
        bystander.kill()
        bystander.wait()
        parent.wait()


def test_killing_spares_the_caller_and_unmarked_shared_memory(monkeypatch):
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
