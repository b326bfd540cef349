"""Logs of processes: crashes, children's output, size limit, and the stacks of hung processes."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megadapo.cluster.process_log import START_LINE, quote_log, read_tail
from megadapo.cluster.watch.diagnostics import (
    ProcessLocation,
    flight_pipe,
    flight_recorder,
    write_stacks,
)
from megadapo.cluster.watch.guard import MARK, start_time
from tests.support.processes.running import wait_until

CHATTY = """
import subprocess, sys, time
from pathlib import Path
from megadapo.cluster.process_log import redirect_output
redirect_output(Path(sys.argv[1]), max_bytes=20_000, check_s=0.02)
subprocess.run(["echo", "of a child"])
for number in range(400):
    print(f"line {number} " + "x" * 200, flush=True)
    time.sleep(0.001)
raise KeyError("the last word")
"""
HANGING = """
import sys, time
from pathlib import Path
from megadapo.cluster.process_log import redirect_output
redirect_output(Path(sys.argv[1]))
def waits_for_ever():
    print("waiting", flush=True)
    time.sleep(600)
waits_for_ever()
"""
CRASHING = """
import faulthandler, sys
from pathlib import Path
from megadapo.cluster.process_log import redirect_output
faulthandler.enable()
redirect_output(Path(sys.argv[1]))
faulthandler._sigsegv()
"""


def start(source: str, log: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", source, str(log)], env={**os.environ, **environment}
    )


def here(pid: int) -> ProcessLocation:
    return ProcessLocation(node="a", pid=pid, started=start_time(pid))


def test_log_has_all_output_and_stays_short(tmp_path):
    log = tmp_path / "logs" / "trainer-rank-3.log"
    assert start(CHATTY, log).wait(timeout=60) == 1
    before = log.with_name("trainer-rank-3.log.1")
    assert log.stat().st_size + before.stat().st_size < 80_000
    assert "KeyError: 'the last word'" in log.read_text()
    assert quote_log(log).endswith("KeyError: 'the last word'")
    assert quote_log(log).startswith(f" (log: {log}); it ends in\n")


def test_native_crash_is_appended_to_log(tmp_path):
    log = tmp_path / "engine-0.log"
    log.write_text(f"{START_LINE}of an earlier process\n")
    assert start(CRASHING, log).wait(timeout=60) == -signal.SIGSEGV
    assert "of an earlier process" in log.read_text()
    tail = read_tail(log)
    assert "Segmentation fault" in tail and "earlier" not in tail


def test_empty_log_is_named_without_quote(tmp_path):
    log = tmp_path / "engine-0.log"
    assert quote_log(log) == f" (log: {log})"
    log.write_text(START_LINE)
    assert quote_log(log) == f" (log: {log})"


@pytest.mark.fault
def test_hung_processes_write_stacks_and_others_survive(tmp_path):
    """One process is stopped, one is found by its mark, one does not handle the signal."""
    mark = f"test-{os.getpid()}-{time.time_ns()}"
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    stopped, marked = start(HANGING, logs[0]), start(HANGING, logs[1], **{MARK: mark})
    deaf = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark})
    try:
        for log in logs:
            wait_until(lambda log=log: log.exists() and "waiting" in log.read_text())
        os.kill(stopped.pid, signal.SIGSTOP)
        # a pipe without a reader, and a missing one
        pipe = tmp_path / "nccl-rank-0.pipe"
        os.mkfifo(pipe)
        another_owner = ProcessLocation(node="a", pid=deaf.pid, started="0")
        write_stacks(
            [here(stopped.pid), another_owner], mark, [pipe, tmp_path / "nccl-rank-1.pipe"]
        )
        for log in logs:
            assert "in waits_for_ever" in log.read_text()
        assert [process.poll() for process in (stopped, marked, deaf)] == [None] * 3
    finally:
        for process in (stopped, marked, deaf):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_nccl_record_is_requested_with_torchs_names(tmp_path):
    """A rank without a pipe, or without a reader, costs no time."""
    environment = flight_recorder(tmp_path)
    with (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb") as library:
        known = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ)
        # the other names are only in builds of torch with NCCL
        for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            assert name in environment and known.find(name.encode()) >= 0
        known.close()
    pipe = flight_pipe(tmp_path, 3)
    assert str(pipe) == environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_stacks([], None, [pipe, flight_pipe(tmp_path, 4)])
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)
