"""A stop signal waits for a safe place, ends a rollout at once, and a second one is final."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megadapo.errors import RunInterrupted
from megadapo.run.stop import StopSignal


@pytest.fixture
def stop():
    stop = StopSignal()
    stop.install()
    yield stop
    stop.uninstall()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_next_check(stop, number):
    """Raised in the middle of an update, it would leave half-updated weights to be saved."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)
    with pytest.raises(RunInterrupted, match=number.name):
        stop.check()


def test_an_interruptible_block_ends_at_once(stop):
    start = time.monotonic()
    with pytest.raises(RunInterrupted), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert time.monotonic() - start < 1


def test_a_signal_that_came_before_ends_an_interruptible_block_before_it_begins(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    entered = False
    with pytest.raises(RunInterrupted), stop.interruptible():
        entered = True
    assert not entered


def test_a_library_that_wraps_what_the_handler_raises_does_not_hide_it(stop):
    """Ray's C core turns it into a SystemError, which would end the run unsaved."""
    with pytest.raises(RunInterrupted), stop.interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except RunInterrupted as error:
            raise SystemError("returned a result with an exception set") from error


def test_errors_of_the_block_itself_come_through(stop):
    with pytest.raises(SystemError, match="its own"), stop.interruptible():
        raise SystemError("its own")


def test_after_an_interruptible_block_signals_wait_again(stop):
    with stop.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_uninstalling_gives_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.install()
    stop.uninstall()
    assert signal.getsignal(signal.SIGTERM) is before


STUBBORN = """
import time
from megadapo.run.stop import StopSignal
StopSignal().install()
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.fault
def test_a_second_signal_ends_a_process_that_never_checks():
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == -signal.SIGTERM
    process.stdout.close()
