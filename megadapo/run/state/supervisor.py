"""Starts a training again after failures that a new start can mend, and only after those."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megadapo.cluster.processes import descendants
from megadapo.errors import DataError, InfraError, RunInterruptedError
from megadapo.run.state.lease import STALE_S, heartbeat_of
from megadapo.run.state.status import Status, read_status
from megadapo.run.state.stop import SIGNALS

RESTARTED = (InfraError.exit_code, RunInterruptedError.exit_code)
"""Exit codes after which the same run may do better: failed processes, and preemption."""
CUT_OFF = 1
"""Exit code of a driver that Ray's core ends when its daemons are gone, without time to say how it
ended. After an error that nobody expected, which has the same code, it does say so."""
MAX_FRUITLESS = 3
"""Restarts in a row without a completed step, after which another would not help either."""
GO_ON = "--run.resume=auto"
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
WATCH_S = 1.0
"""Between two looks at the driver's heartbeat."""
LEFTOVERS_S = 60.0
"""What a killed driver started ends by itself within seconds; after this long it is killed."""
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs a training as a process of its own, again and again where that helps."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        max_restarts: int,
        say: Callable[[str], None],
        first_wait_s: float = FIRST_WAIT_S,
        stale_s: float = STALE_S,
    ) -> None:
        """
        Args:
            command: one start of the training; overrides of its configuration can be appended.
            folder: the run's.
            max_restarts: restarts in all.
            say: shows a line to the user.
            first_wait_s: before a restart, where steps were completed.
            stale_s: without a heartbeat after which a driver hangs.
        """
        self._command = list(command)
        self._folder = folder
        self._max_restarts = max_restarts
        self._say = say
        self._first_wait_s = first_wait_s
        self._stale_s = stale_s
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_to_stop = False

    def run(self) -> int:
        """Return the exit code of the last start; 128 + its number where a signal ended it."""
        _adopt_orphans()
        previous = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            return self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        fruitless = 0
        for restart in range(self._max_restarts + 1):
            code, status = self._start()
            fruitless = 0 if status is not None and status.step > status.resumed_from else fruitless
            reason = self._why_not_again(code, status, restart, fruitless)
            if reason is not None:
                if code != 0:
                    self._say(f"not started again: {reason}")
                break
            fruitless += 1
            wait_s = min(self._first_wait_s * 2 ** (fruitless - 1), LONGEST_WAIT_S)
            self._say(
                f"ended with {_name(code)} after step {0 if status is None else status.step}; "
                f"restart {restart + 1} of {self._max_restarts} in {wait_s:g} s"
            )
            if not self._sleep(wait_s):
                break
        return code if code >= 0 else 128 - code

    def _start(self) -> tuple[int, Status | None]:
        """Run one driver to its end; the status is None where it did not come to the run."""
        # a session of its own: Ctrl-C must reach it once, from here
        self._child = subprocess.Popen(self._command, start_new_session=True)
        code = self._wait_for(self._child)
        _end_leftovers()
        try:
            status = read_status(self._folder)
        except DataError:
            return code, None
        if status.pid != self._child.pid:
            return code, None
        if status.checkpoint_step > status.resumed_from:
            # --resume PATH is where the run began, not where it goes on
            self._command = [word for word in self._command if word != GO_ON] + [GO_ON]
        return code, status

    def _wait_for(self, driver: subprocess.Popen[bytes]) -> int:
        """Return a driver's exit code; one whose heart stops is killed."""
        beat, since = None, time.monotonic()
        while True:
            try:
                return driver.wait(timeout=WATCH_S)
            except subprocess.TimeoutExpired:
                seen = heartbeat_of(self._folder, driver.pid)
            if seen is None or seen != beat:
                beat, since = seen, time.monotonic()
            elif time.monotonic() - since > self._stale_s:
                self._say(f"the driver has had no heartbeat for {self._stale_s:g} s: it is killed")
                driver.kill()

    def _why_not_again(
        self, code: int, status: Status | None, restart: int, fruitless: int
    ) -> str | None:
        if code == 0:
            return "it has finished"
        if self._asked_to_stop:
            return "it was asked to stop"
        was_cut_off = code == CUT_OFF and status is not None and status.state == "running"
        if code > 0 and code not in RESTARTED and not was_cut_off:
            return f"{_name(code)} would come again"
        if restart == self._max_restarts:
            return f"it was, {self._max_restarts} times"
        if fruitless == MAX_FRUITLESS:
            return f"{MAX_FRUITLESS} restarts in a row completed no step"
        return None

    def _sleep(self, seconds: float) -> bool:
        """Wait; whether the run is still to be started again then."""
        until = time.monotonic() + seconds
        while not self._asked_to_stop and time.monotonic() < until:
            time.sleep(0.1)
        return not self._asked_to_stop

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def _adopt_orphans() -> None:
    """Become the parent of what a killed driver leaves behind, so that it can be found."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise InfraError(f"prctl: {os.strerror(ctypes.get_errno())}")


def _end_leftovers() -> None:
    """Wait until all that a driver started has ended, and its GPUs' memory is free with it."""
    give_up = time.monotonic() + LEFTOVERS_S
    while _reap() and (left := descendants(os.getpid())):
        if time.monotonic() > give_up:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)


def _reap() -> bool:
    """Take note of children that have ended; False where none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            continue
    except ChildProcessError:
        return False
    return True


def _name(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
