"""How a run is asked to stop: SIGTERM (preemption) or Ctrl-C once, gently; twice, at once.

A scheduler that signals every process of a job reaches a driver both itself and through its
supervisor: what comes within a moment is one request.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megadapo.errors import RunInterruptedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_S = 0.3


@dataclass(frozen=True)
class _Bound:
    """A block that may be finished only within the grace."""

    expected_end: float
    """On the clock `time.monotonic`."""
    reserved_s: float


class StopSignal:
    """Remembers a stop signal until the run is at a place where stopping loses nothing."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        """`grace_s`: seconds from the signal to the kill that follows it; 0: none follows."""
        self._grace_s = grace_s
        self._requested: str | None = None
        self._requested_at = 0.0
        self._may_interrupt = False
        self._bound: _Bound | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over from whoever handles them now."""
        if not self._previous:
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}
            if self._grace_s > 0:
                number = signal.SIGALRM
                self._previous[number] = signal.signal(number, self._end_of_grace)

    def uninstall(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def check(self) -> None:
        """Stop here if a stop has been asked for.

        Raises:
            RunInterruptedError: it has.
        """
        if self._requested is not None:
            raise RunInterruptedError(f"stopped by {self._requested}")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this block a signal stops the run at once instead of at the next `check`.

        Raises:
            RunInterruptedError: a stop has been asked for, before the block or within it.
        """
        self.check()
        self._may_interrupt = True
        try:
            with _unwrapped():
                yield
        finally:
            self._may_interrupt = False

    @contextmanager
    def within_grace(self, expected_s: float, *, reserved_s: float) -> Iterator[None]:
        """Within this block a signal stops the run where the block would outlast the grace.

        Args:
            expected_s: what the block takes, as far as that is known.
            reserved_s: what must be left of the grace behind it.

        Raises:
            RunInterruptedError: it would, or it does.
        """
        if self._grace_s == 0:
            yield
            return
        outer, self._bound = self._bound, _Bound(time.monotonic() + expected_s, reserved_s)
        try:
            with _unwrapped():
                self._stop_if_late()
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._bound = outer

    def _stop_if_late(self) -> None:
        """Stop where the block outlasts the grace of a signal that has come; else wait for that."""
        if self._requested is None or self._bound is None:
            return
        now, bound = time.monotonic(), self._bound
        left = self._requested_at + self._grace_s - bound.reserved_s - now
        if left <= 0 or bound.expected_end - now > left:
            self._bound = None
            raise RunInterruptedError(
                f"stopped by {self._requested}: what was under way would have taken "
                f"{max(0.0, bound.expected_end - now):.0f} s more, and {max(0.0, left):.0f} s of "
                f"run.grace_s = {self._grace_s:g} were left for it"
            )
        signal.setitimer(signal.ITIMER_REAL, left)

    def _end_of_grace(self, number: int, frame: FrameType | None) -> None:
        self._stop_if_late()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested is not None:
            if time.monotonic() < self._requested_at + ONE_REQUEST_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._requested = signal.Signals(number).name
        self._requested_at = time.monotonic()
        if self._may_interrupt:
            self._may_interrupt = False
            self.check()
        self._stop_if_late()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise what a signal handler raised, which Ray's C core wraps."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, RunInterruptedError):
            raise error.__cause__ from None
        raise
