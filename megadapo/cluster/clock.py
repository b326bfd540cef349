"""How far the clocks of two nodes are apart."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TRIES = 8
"""Times a clock is asked: the quickest answer says most."""


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """What a process reads off its node's clock."""

    machine: str
    """The same in all containers of a machine, whose clock is one."""
    time_ns: int
    """Nanoseconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """How far another clock is ahead of this one's, in nanoseconds."""

    ahead_ns: int
    error_ns: int
    """It is not known better than this: half of what the quickest answer took."""


def read_clock() -> ClockReading:
    """This process's node and time."""
    return ClockReading(machine=this_machine(), time_ns=time.time_ns())


def this_machine() -> str:
    """This boot of the machine, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def clock_offset(ask: Callable[[], ClockReading]) -> ClockOffset:
    """Compare this clock with the one that `ask` reads; exactly 0 where they are the same one.

    A reading is held against the middle of its question and answer, as NTP does (RFC 5905).
    """
    here = read_clock().machine
    best: ClockOffset | None = None
    for _ in range(TRIES):
        asked = time.time_ns()
        reading = ask()
        answered = time.time_ns()
        if reading.machine == here:
            return ClockOffset(ahead_ns=0, error_ns=0)
        error = (answered - asked) // 2
        if best is None or error < best.error_ns:
            best = ClockOffset(ahead_ns=reading.time_ns - asked - error, error_ns=error)
    assert best is not None
    return best
