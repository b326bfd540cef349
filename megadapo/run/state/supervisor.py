"""Restarts a training after failures that a restart can fix."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from megadapo.cluster.process_log import QUIT_SIGNAL, driver_log
from megadapo.cluster.processes import descendants
from megadapo.errors import DataError, InfraError, MegadapoError, RunInterruptedError
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from megadapo.run.state.events import SUPERVISOR, Event, EventHook
from megadapo.run.state.lease import STALE_S, heartbeat_of, holder_of
from megadapo.run.state.status import STALL_S, Status, read_status, rewrite_status
from megadapo.run.state.stop import SIGNALS, STEP_SIGNALS, restarts_after, take_stop_file

RESTARTED = (MegadapoError.exit_code, InfraError.exit_code, RunInterruptedError.exit_code)
"""Exit codes that a restart can fix: an unexpected error, or Ray's core when its daemons are gone;
failed processes; and preemption."""
MAX_SAME_ENDS = 5
"""Number of ends with one message in one step, in a row, after which no restart can help."""
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
GIVE_UP_AFTER_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class DriverEnd:
    """The end of one driver of a run."""

    code: int
    """Exit code; minus the number of the signal that ended it."""
    made_progress: bool
    """Whether it completed a step, computed a micro-batch or generated a token."""
    step: int
    """Last completed step."""
    journal_bytes: int
    """Size of the journal, which grows with every group that a restart does not repeat."""
    reason: str
    stays_stopped: bool = False
    """Whether it was asked not to be started again."""

    def repeats(self, last: DriverEnd) -> bool:
        """Return whether the `last` driver failed in this step, as far in it, with this message."""
        # a signal alone may have come from anyone, as when machines are reclaimed
        has_message = self.reason != end_name(self.code)
        if self.code == RunInterruptedError.exit_code or not has_message or self.step != last.step:
            return False
        is_further = self.journal_bytes > last.journal_bytes
        return not is_further and _without_numbers(self.reason) == _without_numbers(last.reason)


class RestartBudget:
    """The restarts that a run has left, and the pause before the next one."""

    def __init__(self, max_restarts: int, give_up_after_s: float, first_wait_s: float) -> None:
        """`max_restarts`, `give_up_after_s` and `first_wait_s` are as in `Supervisor`."""
        self.num_charged = 0
        self._max_restarts = max_restarts
        self._give_up_after_s = give_up_after_s
        self._first_wait_s = first_wait_s
        self._progress_at = time.monotonic()
        self._num_without = 0
        """Number of starts in a row without progress."""
        self._last: DriverEnd | None = None
        """End of the last start that made progress."""
        self._num_same = 0

    def charge(self, end: DriverEnd) -> str | None:
        """Charge the restart after `end`; return the reason if none is left."""
        if end.stays_stopped:
            return "it was asked to stop"
        if end.code > 0 and end.code not in RESTARTED:
            return f"a restart cannot fix {end_name(end.code)}"
        if not end.made_progress:
            self._num_without += 1
            if time.monotonic() - self._progress_at >= self._give_up_after_s:
                return (
                    f"{self._num_without} starts in {timedelta(seconds=self._give_up_after_s)} "
                    "(--give-up-after) made no progress"
                )
            return None
        self._progress_at, self._num_without = time.monotonic(), 0
        same = self._last is not None and end.repeats(self._last)
        self._last, self._num_same = end, self._num_same + 1 if same else 1
        if self._num_same == MAX_SAME_ENDS:
            return f"step {end.step + 1} ended {MAX_SAME_ENDS} times in a row with the same message"
        if self.num_charged == self._max_restarts:
            return f"the limit of {self._max_restarts} restarts is reached"
        self.num_charged += 1
        return None

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the next start."""
        doublings = max(self._num_without, self._num_same) - 1
        return min(self._first_wait_s * 2.0 ** min(doublings, 60), LONGEST_WAIT_S)

    def __str__(self) -> str:
        if self._num_without:
            return f"try {self._num_without + 1} since the last progress"
        return f"restart {self.num_charged} of {self._max_restarts}"


def end_name(code: int) -> str:
    """Return the name of an exit code, or of the signal that minus `code` is the number of."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _without_numbers(reason: str) -> str:
    """Return a message without words that have digits: processes, ranks, times and sizes vary."""
    return re.sub(r"\w*\d\w*", "#", reason.partition(" (log: ")[0])


RESUME = "--run.resume=auto"
LOOK_S = 1.0
COUNTED_LOOKS = 5
"""Longest time between two looks that counts as silence of the driver, in looks; in a longer one
this process was suspended, and perhaps the driver with it."""
STACKS_S = 1.0
"""Seconds that a driver has to write its stacks before it is killed."""
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
        on_event: str | None = None,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        first_wait_s: float = FIRST_WAIT_S,
        stale_s: float = STALE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """
        Args:
            command: starts the training; config overrides can be appended.
            max_restarts: number of restarts of drivers that made progress.
            say: shows a line to the user.
            on_event: command for the events restart and end.
            give_up_after_s: seconds in which drivers without progress are started again.
            first_wait_s: seconds before the first of several restarts.
            stale_s: seconds without a heartbeat after which a driver counts as hung.
            stall_s: seconds without progress after which it does; longer after long pauses.
        """
        self._command = list(command)
        self._folder = folder
        self._budget = RestartBudget(max_restarts, give_up_after_s, first_wait_s)
        self._say = say
        self._hook = EventHook(on_event, folder, warn=say)
        self._stale_s = stale_s
        self._stall_s = stall_s
        self._child: subprocess.Popen[bytes] | None = None
        self._earlier: str | None = None
        """Driver that the status named before this start."""
        self._asked_to_stop = False

    def run(self) -> int:
        """Return the exit code of the last start; 128 + N if signal N ended it."""
        # become the parent of processes that a killed driver leaves behind, to find them
        libc: Any = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise InfraError(f"prctl: {os.strerror(ctypes.get_errno())}")
        previous = {
            number: signal.signal(number, self._forward) for number in (*SIGNALS, *STEP_SIGNALS)
        }
        # a terminal that is closed ends neither the supervisor nor the driver, which inherits this
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            code = self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code

    def _run(self) -> int:
        reason = None
        while (end := self._start()).code != 0:
            why_not = "it was asked to stop" if self._asked_to_stop else self._budget.charge(end)
            if why_not is None and not self._wait(end):
                why_not = "it was asked to stop"
            if why_not is not None:
                self._say(f"not restarting: {why_not}")
                reason = f"{end.reason}; not restarted: {why_not}"
                self._write_end(reason)
                break
        self._send_event("end", reason)
        return end.code

    def _start(self) -> DriverEnd:
        """Run one driver until it ends."""
        self._earlier = None
        with suppress(DataError):
            self._earlier = read_status(self._folder).driver
        # in its own session, so that Ctrl-C reaches it once, from here; the driver unblocks signals
        # when it has handlers for them
        signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        self._child = subprocess.Popen(self._command, start_new_session=True, env=environment)
        if self._asked_to_stop:
            # a signal that came meanwhile found no driver
            self._child.terminate()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)
        code, killed_for = self._wait_for(self._child)
        _end_leftovers()
        status = self._status_of(self._child.pid)
        if status is None:
            reason = killed_for or f"{end_name(code)} before it reached the run"
            return DriverEnd(code=code, made_progress=False, step=0, journal_bytes=0, reason=reason)
        if status.checkpoint_step > status.resumed_from:
            # from here on the run's newest checkpoint, even if the command names another one
            self._command = [word for word in self._command if word != RESUME] + [RESUME]
        completed = status.step > status.resumed_from
        return DriverEnd(
            code=code,
            # with a batch from the journal the first update may fail before it counts anything
            made_progress=completed
            or status.micro_batches + status.tokens > 0
            or status.phase == "train",
            step=status.step,
            journal_bytes=_num_bytes(self._folder / JOURNAL_FOLDER),
            reason=killed_for or status.reason or end_name(code),
            stays_stopped=status.stays_stopped,
        )

    def _wait_for(self, driver: subprocess.Popen[bytes]) -> tuple[int, str | None]:
        """Return a driver's exit code, and the reason if it was killed for its silence."""
        look_s = min(LOOK_S, self._stale_s / 20)
        heartbeat, progress = (_Silence(COUNTED_LOOKS * look_s) for _ in range(2))
        hung_for = None
        while True:
            try:
                return driver.wait(timeout=look_s), hung_for
            except subprocess.TimeoutExpired:
                status = self._status_of(driver.pid)
            hung_before, hung_for = hung_for, None
            # a driver that has not reached the run must do so in time
            seen, limit_s = "start", self._stall_s
            if status is not None:
                seen, limit_s = f"progress {status.progress}", status.stall_limit_s(self._stall_s)
            if progress.seconds(seen) > limit_s:
                hung_for = f"the driver has made no progress for {timedelta(seconds=limit_s)}"
            if heartbeat.seconds(heartbeat_of(self._folder, driver.pid)) > self._stale_s:
                hung_for = f"the driver has sent no heartbeat for {self._stale_s:g} s"
            # a driver that was suspended too needs a moment
            if hung_for is not None and hung_before is not None:
                self._kill(driver, hung_for)

    def _kill(self, driver: subprocess.Popen[bytes], reason: str) -> None:
        """Kill a driver that hangs, after it has written its stacks."""
        self._say(f"{reason}: killing it; its stacks are in {driver_log(self._folder)}")
        driver.send_signal(QUIT_SIGNAL)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(timeout=STACKS_S)
        driver.kill()

    def _wait(self, end: DriverEnd) -> bool:
        """Wait for the next start; return False if the supervisor was asked to stop."""
        wait_s = self._budget.wait_s
        self._say(
            f"ended with {end_name(end.code)} after step {end.step}; {self._budget} in {wait_s:g} s"
        )
        until = datetime.now().astimezone() + timedelta(seconds=wait_s)
        if not self._has_driver():
            rewrite_status(
                self._folder,
                state="waiting",
                reason=end.reason,
                waits_until=until.isoformat(timespec="seconds"),
            )
        stop_waiting = time.monotonic() + wait_s
        self._send_event("restart", end.reason)
        while not self._asked_to_stop and time.monotonic() < stop_waiting:
            time.sleep(0.1)
            text = take_stop_file(self._folder)
            self._asked_to_stop |= text is not None and not restarts_after(text)
        return not self._asked_to_stop

    def _send_event(self, event: Event, reason: str | None) -> None:
        """Send an event, and wait for the command: it must not outlive the wait for a driver."""
        status = None
        with suppress(DataError):
            status = read_status(self._folder)
        self._hook.send(event, status, reason=reason)
        self._hook.finish()

    def _write_end(self, reason: str) -> None:
        """Write the end of a run that its last driver has not written."""
        with suppress(DataError):
            if read_status(self._folder).state in ("running", "waiting") and not self._has_driver():
                rewrite_status(
                    self._folder,
                    state="stopped" if self._asked_to_stop else "failed",
                    reason=reason,
                    waits_until=None,
                )

    def _status_of(self, pid: int) -> Status | None:
        """Return the status that a driver wrote; None if it did not come so far."""
        try:
            status = read_status(self._folder)
        except DataError:
            return None
        # another container, or this one before a reboot, may have had a driver with the same pid
        is_own = (status.host, status.pid) == (socket.gethostname(), pid)
        return status if is_own and status.driver != self._earlier else None

    def _has_driver(self) -> bool:
        """Return whether a driver that another process started may write to the folder."""
        try:
            return holder_of(self._folder) is not None
        except (OSError, MegadapoError):
            return True

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop |= number in SIGNALS
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


class _Silence:
    """The time during which a value did not change, while this process was running."""

    def __init__(self, counted_s: float) -> None:
        """`counted_s`: longest time between two looks that counts."""
        self._counted_s = counted_s
        self._value: object = None
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def seconds(self, value: object) -> float:
        """Return the seconds since the value last changed; 0 for None."""
        since, self._looked_at = self._looked_at, time.monotonic()
        if value is None or value != self._value:
            self._value, self._seconds = value, 0.0
        else:
            self._seconds += min(self._looked_at - since, self._counted_s)
        return self._seconds


def _num_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; 0 without it."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def _end_leftovers() -> None:
    """Wait until all processes of a driver have ended, which also frees their GPU memory."""
    give_up = time.monotonic() + LEFTOVERS_S
    while _reap() and (left := descendants(os.getpid())):
        if time.monotonic() > give_up:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _reap() -> bool:
    """Reap children that have ended; return whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            continue
    except ChildProcessError:
        return False
    return True
