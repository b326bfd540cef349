"""Limits on the starts of a supervised run.

A start without progress found no node, no folder or no GPU, or was ended while it started. It is
repeated for as long as the user allows. A start that made progress is charged to the number of
restarts.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from datetime import timedelta

from megadapo.errors import InfraError, MegadapoError, RunInterruptedError

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
        """
        Args:
            max_restarts: number of restarts after starts that made progress.
            give_up_after_s: seconds since the last progress after which starting is given up.
            first_wait_s: pause before the first of several restarts.
        """
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
