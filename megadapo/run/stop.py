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
from types import FrameType
from typing import Any

from megadapo.errors import RunInterrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_S = 0.3


class StopSignal:
    """Remembers a stop signal until the run is at a place where stopping loses nothing."""

    def __init__(self) -> None:
        self._requested: str | None = None
        self._requested_at = 0.0
        self._may_interrupt = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over from whoever handles them now."""
        if not self._previous:
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def uninstall(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def check(self) -> None:
        """Stop here if a stop has been asked for.

        Raises:
            RunInterrupted: it has.
        """
        if self._requested is not None:
            raise RunInterrupted(f"stopped by {self._requested}")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this block a signal stops the run at once instead of at the next `check`.

        Raises:
            RunInterrupted: a stop has been asked for, before the block or within it.
        """
        self.check()
        self._may_interrupt = True
        try:
            yield
        except SystemError as error:
            # Ray's C core wraps what a signal handler raises under it
            if isinstance(error.__cause__, RunInterrupted):
                raise error.__cause__ from None
            raise
        finally:
            self._may_interrupt = False

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
