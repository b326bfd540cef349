"""Restarts a training after failures that a restart can fix."""

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
from megadapo.errors import DataError, InfraError, MegadapoError, RunInterruptedError
from megadapo.run.state.lease import STALE_S, heartbeat_of
from megadapo.run.state.status import Status, read_status
from megadapo.run.state.stop import SIGNALS

RESTARTED = (MegadapoError.exit_code, InfraError.exit_code, RunInterruptedError.exit_code)
"""Exit codes that a restart can fix: an unexpected error, or Ray's core when its daemons are gone;
failed processes; and preemption."""
MAX_FRUITLESS = 3
"""Number of restarts in a row without a completed step after which the supervisor gives up."""
RESUME = "--run.resume=auto"
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
WATCH_S = 1.0
"""Seconds between two checks of the driver's heartbeat."""
LEFTOVERS_S = 60.0
"""Seconds after which the children of a killed driver are killed; they normally end earlier."""
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """A parent process of a training, which restarts it after failures."""

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
            command: starts the training; config overrides can be appended.
            say: shows a line to the user.
            first_wait_s: seconds before a restart if steps were completed.
            stale_s: seconds without a heartbeat after which a driver counts as hung.
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
        """Return the exit code of the last start; 128 + N if signal N ended it."""
        # become the parent of processes that a killed driver leaves behind, to find them
        libc: Any = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise InfraError(f"prctl: {os.strerror(ctypes.get_errno())}")
        previous = {number: signal.signal(number, self._forward) for number in SIGNALS}
        # a terminal that is closed ends neither the supervisor nor the driver, which inherits this
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
            reason = self._why_not_restart(code, restart, fruitless)
            if reason is not None:
                if code != 0:
                    self._say(f"not restarting: {reason}")
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
        """Run one driver until it ends; the status is None if the run did not start."""
        # in its own session, so that Ctrl-C reaches it once, from here
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
            # from here on the run's newest checkpoint, even if the command names another one
            self._command = [word for word in self._command if word != RESUME] + [RESUME]
        return code, status

    def _wait_for(self, driver: subprocess.Popen[bytes]) -> int:
        """Return a driver's exit code; kill it if its heartbeat stops."""
        last, since = None, time.monotonic()
        while True:
            try:
                return driver.wait(timeout=WATCH_S)
            except subprocess.TimeoutExpired:
                seen = heartbeat_of(self._folder, driver.pid)
            if seen is None or seen != last:
                last, since = seen, time.monotonic()
            elif time.monotonic() - since > self._stale_s:
                self._say(f"the driver has sent no heartbeat for {self._stale_s:g} s: killing it")
                driver.kill()

    def _why_not_restart(self, code: int, restart: int, fruitless: int) -> str | None:
        if code == 0:
            return "it has finished"
        if self._asked_to_stop:
            return "it was asked to stop"
        if code > 0 and code not in RESTARTED:
            return f"a restart cannot fix {_name(code)}"
        if restart == self._max_restarts:
            return f"the limit of {self._max_restarts} restarts is reached"
        if fruitless == MAX_FRUITLESS:
            return f"{MAX_FRUITLESS} restarts in a row completed no step"
        return None

    def _sleep(self, seconds: float) -> bool:
        """Wait; return False if the supervisor was asked to stop."""
        until = time.monotonic() + seconds
        while not self._asked_to_stop and time.monotonic() < until:
            time.sleep(0.1)
        return not self._asked_to_stop

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def _end_leftovers() -> None:
    """Wait until all processes of a driver have ended, which also frees their GPU memory."""
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
    """Reap children that have ended; return whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            continue
    except ChildProcessError:
        return False
    return True


def _name(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
