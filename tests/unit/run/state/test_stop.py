"""A request to stop waits for a safe place, or ends a rollout at once; a second one is final."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from unittest.mock import Mock

import pytest

from megadapo.config import RunConfig
from megadapo.errors import InfraError, RunInterruptedError
from megadapo.run.run import Run
from megadapo.run.state.checkpoint import WriteTrainer
from megadapo.run.state.status import read_status
from megadapo.run.state.stop import EVALUATE_SIGNAL, SAVE_SIGNAL, StopSignal, take_stop_file
from tests.support.runs.checkpoints import write_shard
from tests.support.runs.runs_alone import config_of, record_step, saved_steps


@pytest.fixture
def stop():
    stop = StopSignal()
    stop.install()
    yield stop
    stop.uninstall()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_waits_for_the_next_check(stop, number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)
    with pytest.raises(RunInterruptedError, match=number.name):
        stop.check()


def test_interruptible_block_ends_at_once(stop):
    start = time.monotonic()
    with pytest.raises(RunInterruptedError), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert time.monotonic() - start < 1


def test_earlier_signal_prevents_an_interruptible_block(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    entered = False
    with pytest.raises(RunInterruptedError), stop.interruptible():
        entered = True
    assert not entered


def test_wrapped_interruption_is_unwrapped(stop):
    """Ray's C core turns it into a SystemError."""
    with pytest.raises(RunInterruptedError), stop.interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except RunInterruptedError as error:
            raise SystemError("returned a result with an exception set") from error


def test_other_errors_pass_through(stop):
    with pytest.raises(SystemError, match="its own"), stop.interruptible():
        raise SystemError("its own")


def test_signals_wait_again_after_an_interruptible_block(stop):
    with stop.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_uninstall_restores_handlers():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.install()
    stop.uninstall()
    assert signal.getsignal(signal.SIGTERM) is before


def test_request_of_another_thread_stops_like_a_signal(stop):
    start = time.monotonic()
    request = partial(stop.request, "a notice", stays_stopped=True)
    with pytest.raises(RunInterruptedError, match="a notice"), stop.interruptible():
        threading.Timer(0.05, request).start()
        time.sleep(5)
    assert stop.stays_stopped and time.monotonic() - start < 2


def test_signal_after_a_notice_does_not_end_the_process(stop):
    """A machine that will be gone sends SIGTERM while the run saves."""
    stop.request("a notice", stays_stopped=False)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RunInterruptedError, match="stopped by a notice"):
        stop.check()
    assert not stop.stays_stopped


def test_request_after_the_end_is_ignored():
    """Its alarm would end the process."""
    stop = StopSignal()
    stop.install()
    stop.uninstall()
    stop.request("a notice", stays_stopped=False)
    stop.check()


def test_step_signals_wait_for_the_step_and_do_not_stop_it(stop):
    os.kill(os.getpid(), SAVE_SIGNAL)
    assert (stop.take(SAVE_SIGNAL), stop.take(SAVE_SIGNAL)) == (True, False)
    os.kill(os.getpid(), EVALUATE_SIGNAL)
    assert (stop.take(SAVE_SIGNAL), stop.take(EVALUATE_SIGNAL)) == (False, True)
    stop.check()


GRACE = """
import os, signal, sys, time
from megadapo.errors import RunInterruptedError
from megadapo.run.state.stop import StopSignal

grace_s, expected_s, takes_s, reserved_s = map(float, sys.argv[1:])
stop = StopSignal(grace_s=grace_s)
stop.install()
start = time.monotonic()
try:
    with stop.within_grace(expected_s, reserved_s=reserved_s):
        os.kill(os.getpid(), signal.SIGTERM)
        while time.monotonic() < start + takes_s:
            time.sleep(0.01)
    print("finished", end=" ")
    with stop.within_grace(60, reserved_s=reserved_s):
        print("began", end=" ")
except RunInterruptedError as error:
    print("interrupted", end=" ")
print(time.monotonic() - start)
"""


@pytest.mark.parametrize(
    ("times", "outcome", "at_s"),
    [
        ((0, 60, 0.1, 60), "finished began", 0.1),
        ((30, 0.1, 0.1, 5), "finished interrupted", 0.1),
        ((30, 60, 60, 5), "interrupted", 0.0),
        ((30, 10, 60, 25), "interrupted", 0.0),
        ((1.2, 0.0, 60, 0.9), "interrupted", 0.3),
    ],
    ids=["no-grace", "in-time", "too-long", "no-room-for-a-save", "longer-than-expected"],
)
def test_block_that_outlasts_the_grace_is_interrupted(times, outcome, at_s):
    command = [sys.executable, "-c", GRACE, *map(str, times)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    *words, seconds = result.stdout.split()
    assert " ".join(words) == outcome, result.stderr
    assert at_s <= float(seconds) < at_s + 5


STUBBORN = """
import time
from megadapo.run.state.stop import StopSignal
StopSignal().install()
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.fault
def test_second_signal_ends_the_process():
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == -signal.SIGTERM
    process.stdout.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("megadapo.run.state.stop.LOOK_S", 0.05)


def wait_in_a_rollout(config: RunConfig, begin, write: WriteTrainer = write_shard) -> None:
    """Complete one step, and save it as the loop does when the rollout of the next is stopped."""
    with Run.open(config) as run:
        try:
            for step in run.steps():
                if step == 2:
                    begin()
                with run.phase("rollout", interruptible=True):
                    time.sleep(0 if step == 1 else 20)
                record_step(run, step)
        except RunInterruptedError:
            run.save(write, wait=True)
            raise


@pytest.mark.parametrize(
    ("text", "stays_stopped", "reason"),
    [("", True, "/stop"), ("restart node-3 ends\n", False, "/stop: restart node-3 ends")],
)
def test_stop_file_saves_and_stops_and_is_used_once(tmp_path, text, stays_stopped, reason):
    path = tmp_path / "stop"
    path.write_text("of another driver, which has ended")
    os.utime(path, (0, 0))
    start = time.monotonic()
    with pytest.raises(RunInterruptedError, match=f"stopped by the file .*{reason}$"):
        wait_in_a_rollout(config_of(tmp_path), lambda: path.write_text(text))
    assert time.monotonic() - start < 10
    assert saved_steps(tmp_path) == ["step-1"] and not path.exists()
    status = read_status(tmp_path)
    assert (status.state, status.stays_stopped) == ("stopped", stays_stopped)


def test_stopped_run_stays_stopped_if_its_save_fails(tmp_path):
    """A supervisor took the failed save for the reason of the end, and started the run again."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(InfraError, match="No space left"):
        wait_in_a_rollout(config_of(tmp_path), (tmp_path / "stop").touch, full)
    status = read_status(tmp_path)
    assert (status.state, status.stays_stopped) == ("failed", True)


def test_stop_file_of_a_start_is_followed(tmp_path):
    """It was taken for one of an earlier driver, because the run's folder was not open yet."""
    (tmp_path / "stop").touch()
    with pytest.raises(RunInterruptedError, match="stopped by the file"):
        wait_in_a_rollout(config_of(tmp_path), lambda: None)


def test_stop_file_is_read_after_its_text_is_written(tmp_path):
    """`echo restart > stop` makes an empty file first."""
    path = tmp_path / "stop"
    path.touch()
    threading.Timer(0.05, lambda: path.write_text("restart")).start()
    assert take_stop_file(tmp_path) == "restart"
    assert take_stop_file(tmp_path) is None
