"""Signals to a driver: SIGTERM or Ctrl-C once stops a run gently, a second one at once.

A scheduler that signals every process of a job reaches the driver directly and through its
supervisor, so signals within `ONE_REQUEST_S` count as one request. SIGUSR1 saves, and SIGUSR2
evaluates, the step that is in progress.

The file `stop` in the run's folder requests a stop too. Any process on any machine can write it,
such as one that hears that its machine will end.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from megadapo.cluster.watch.guard import start_time
from megadapo.errors import RunInterruptedError
from megadapo.run.state.lease import age_s

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR1
EVALUATE_SIGNAL = signal.SIGUSR2
STEP_SIGNALS = (SAVE_SIGNAL, EVALUATE_SIGNAL)
"""Signals that ask for something at the end of a step."""
ONE_REQUEST_S = 0.3


class StopSignal:
    """A stop signal, delayed until the run can stop without losing work."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        """`grace_s`: seconds from the signal until the process is killed; 0 means no kill."""
        self._grace_s = grace_s
        self._requested: str | None = None
        """Name of the signal, or of what else asked for the stop."""
        self.stays_stopped = False
        """Whether the request wants that no supervisor starts the run again."""
        self._signalled_at: float | None = None
        """Time of the stop signal; None if there was none."""
        self._kill_at = math.inf
        """Time at which the process is expected to be killed, on the clock `time.monotonic`."""
        self._asked: set[int] = set()
        """Signals of `STEP_SIGNALS` that no step has answered."""
        self._order: tuple[str, bool] | None = None
        """Arguments of `_begin` that another thread has given."""
        self._lock = threading.Lock()
        self._may_interrupt = False
        self._bound: tuple[float, float] | None = None
        """Expected end of a block that must end within the grace period, on the clock
        `time.monotonic`, and the seconds that must remain after it."""
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Replace the present signal handlers."""
        if not self._previous:
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}
            # a terminal that is closed ends nothing; processes that start later inherit this
            self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
            for number in STEP_SIGNALS:
                self._previous[number] = signal.signal(number, lambda n, _: self._asked.add(n))
            # a supervisor blocks them, because they would end a driver that has no handler yet
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)

    def uninstall(self) -> None:
        """Restore the previous signal handlers."""
        with self._lock:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous = {}

    def take(self, number: signal.Signals) -> bool:
        """Return whether a signal of `STEP_SIGNALS` has come since the last call."""
        was_asked = number in self._asked
        self._asked.discard(number)
        return was_asked

    def request(self, reason: str, *, stays_stopped: bool) -> None:
        """Request a stop from another thread, as a signal would, unless one is requested already.

        `stays_stopped`: whether a supervisor must not start the run again.
        """
        self._order = reason, stays_stopped
        with self._lock:
            if self._previous:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def check(self) -> None:
        """Raise RunInterruptedError, and so stop the run here, if a stop was requested."""
        if self._requested is not None:
            raise RunInterruptedError(f"stopped by {self._requested}")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal stop the run at once within this block, not only at the next `check`."""
        self.check()
        self._may_interrupt = True
        try:
            with _unwrapped():
                yield
        finally:
            self._may_interrupt = False

    @contextmanager
    def within_grace(self, expected_s: float, *, reserved_s: float) -> Iterator[None]:
        """Let a signal stop the run within this block if the block would outlast the grace.

        `reserved_s`: seconds of the grace that must remain after the block.
        """
        if self._grace_s == 0:
            yield
            return
        outer, self._bound = self._bound, (time.monotonic() + expected_s, reserved_s)
        try:
            with _unwrapped():
                self._stop_if_late()
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._bound = outer

    def _stop_if_late(self) -> None:
        """Stop if the block would outlast the grace; otherwise set a timer for its end."""
        if self._requested is None or self._bound is None:
            return
        now, (expected_end, reserved_s) = time.monotonic(), self._bound
        left = self._kill_at - reserved_s - now
        if left <= 0 or expected_end - now > left:
            self._bound = None
            raise RunInterruptedError(
                f"stopped by {self._requested}: the phase would have taken "
                f"{max(0.0, expected_end - now):.0f} s more, and {max(0.0, left):.0f} s of "
                f"run.grace_s = {self._grace_s:g} were left for it"
            )
        signal.setitimer(signal.ITIMER_REAL, left)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is not None:
            if now < self._signalled_at + ONE_REQUEST_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled_at = now
        self._begin(signal.Signals(number).name, stays_stopped=False)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        order, self._order = self._order, None
        if order is None:
            self._stop_if_late()
        else:
            reason, stays_stopped = order
            self._begin(reason, stays_stopped=stays_stopped)

    def _begin(self, reason: str, *, stays_stopped: bool) -> None:
        """Begin to stop, in the main thread; the first request counts."""
        if self._requested is None:
            self._requested, self.stays_stopped = reason, stays_stopped
            self._kill_at = time.monotonic() + self._grace_s
        if self._may_interrupt:
            self._may_interrupt = False
            self.check()
        self._stop_if_late()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Re-raise the error of a signal handler, which Ray's C core wraps in a SystemError."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, RunInterruptedError):
            raise error.__cause__ from None
        raise


STOP_FILE = "stop"
RESTART = "restart"
"""Beginning of a stop file after which a supervisor starts the run again."""
LOOK_S = 2.0
WRITING_S = 0.2
"""Seconds in which the text of a new file appears."""
MAX_TEXT = 200


@contextmanager
def watching_stop_file(folder: Path, stop: StopSignal) -> Iterator[None]:
    """Request a stop when the stop file of a run appears within this block."""
    path, closed = folder / STOP_FILE, threading.Event()

    def watch() -> None:
        while not closed.is_set():
            text = take_stop_file(folder)
            if text is not None:
                reason = f"the file {path}" + (f": {text}" if text else "")
                stop.request(reason, stays_stopped=not restarts_after(text))
            closed.wait(LOOK_S)

    started_s = int(start_time(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError):
        # a file older than this process asked a driver before it
        if age_s(path) > time.clock_gettime(time.CLOCK_BOOTTIME) - started_s:
            take_stop_file(folder)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        # a folder that does not answer must not keep the run
        thread.join(timeout=LOOK_S)


def restarts_after(text: str) -> bool:
    """Return whether a supervisor starts a run again that a stop file with this text stopped."""
    return text.startswith(RESTART)


def take_stop_file(folder: Path) -> str | None:
    """Remove the stop file of a run; return its text, or None if there is no file to remove."""
    path = folder / STOP_FILE
    with suppress(OSError):
        if path.stat().st_size == 0:
            time.sleep(WRITING_S)
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        return " ".join(text.split())[:MAX_TEXT]
    return None
