"""Heartbeats: each process writes to a file that it is alive and how far its work has progressed.

The file is beside the process's log. A reader only looks for changes, so the clocks of two nodes
may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megadapo.errors import ProcessHungError

HEARTBEAT_S = 2.0
"""Longest time between two heartbeats."""
HEARTBEATS_PER_LIMIT = 4
SLOWEST_FACTOR = 10.0
"""Factor on the slowest recent progress; work that takes longer counts as hung."""
RECENT_CALLS = 8
CHECK_S = 1.0
"""Shortest time between two checks."""
MAX_COUNTED_S = 5.0
"""Longest time counted between two checks: the reader may have been suspended too."""
_RECORD_BYTES = 192


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A record of what a process is doing."""

    count: int = 0
    """Number of heartbeats so far."""
    doing: str = ""
    """Name of the call that runs; empty between calls."""
    progress: int = 0
    """Number of progress reports so far."""
    slowest_s: float = 0.0
    """Longest time between two reports, in this call and in recent ones with the same name."""


class HeartbeatSender:
    """A thread that writes this process's heartbeat to a file."""

    def __init__(self, path: Path, *, limit_s: float) -> None:
        """`limit_s`: seconds without a heartbeat after which readers assume a hang."""
        self._count, self._progress, self._doing = 0, 0, ""
        self._since = time.monotonic()
        self._slowest = self._slowest_before = 0.0
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_CALLS))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        every_s = min(HEARTBEAT_S, limit_s / HEARTBEATS_PER_LIMIT)
        threading.Thread(target=self._send, args=(every_s,), daemon=True).start()

    @contextmanager
    def working_on(self, doing: str) -> Iterator[None]:
        """Name the work of this block."""
        recent = self._recent[doing]
        self._since, self._slowest = time.monotonic(), 0.0
        self._slowest_before, self._doing = max(recent, default=0.0), doing
        try:
            yield
        finally:
            self._doing = ""
            self._measure()
            recent.append(self._slowest)

    def report_progress(self) -> None:
        """Count a finished piece of the work."""
        self._measure()
        self._progress += 1

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat; may be called from any thread."""
        doing = self._doing
        slowest_s = max(self._slowest, self._slowest_before) if doing else 0.0
        return Heartbeat(
            count=self._count, doing=doing, progress=self._progress, slowest_s=slowest_s
        )

    def _measure(self) -> None:
        now = time.monotonic()
        self._slowest, self._since = max(self._slowest, now - self._since), now

    def _send(self, every_s: float) -> None:
        wait = threading.Event().wait
        while not wait(every_s):
            self._count += 1
            record = json.dumps(asdict(self.heartbeat())).ljust(_RECORD_BYTES - 1) + "\n"
            # written in place, so it needs no space on a full disk; readers see a folder that is
            # away for long as silence
            with contextlib.suppress(OSError):
                os.pwrite(self._file, record.encode(), 0)


_senders: list[HeartbeatSender] = []
"""Sender of this process, if it has been started."""


def start_heartbeat(path: Path, *, limit_s: float) -> None:
    """Start to send this process's heartbeat to a file."""
    _senders[:] = [HeartbeatSender(path, limit_s=limit_s)]


@contextmanager
def working_on(doing: str) -> Iterator[None]:
    """Name the work of this block in the heartbeat, if one is sent."""
    with _senders[0].working_on(doing) if _senders else contextlib.nullcontext():
        yield


def report_progress() -> None:
    """Count a finished piece of work in the heartbeat, if one is sent."""
    for sender in _senders:
        sender.report_progress()


def heartbeat_file(log: Path) -> Path:
    """Return the heartbeat file of the process with this log."""
    return log.with_suffix(".heartbeat")


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return a process's last heartbeat; None without one or while it is being written."""
    try:
        return Heartbeat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def all_alive(paths: Sequence[Path]) -> bool:
    """Return whether each process sends another heartbeat within a few intervals."""
    before = [read_heartbeat(path) for path in paths]
    deadline = time.monotonic() + HEARTBEATS_PER_LIMIT * HEARTBEAT_S
    while any(read_heartbeat(path) == seen for path, seen in zip(paths, before, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(HEARTBEAT_S / 10)
    return True


@dataclass(kw_only=True)
class _Watched:
    name: str
    path: Path
    log: Path
    last: Heartbeat = Heartbeat()
    silent_s: float = 0.0
    stalled_s: float = 0.0

    def update(self, seconds: float) -> None:
        """Read the heartbeat, `seconds` after the last time."""
        last, now = self.last, read_heartbeat(self.path) or self.last
        self.silent_s = self.silent_s + seconds if now.count == last.count else 0.0
        is_stalled = (now.doing, now.progress) == (last.doing, last.progress)
        self.stalled_s = self.stalled_s + seconds if is_stalled else 0.0
        self.last = now


class HeartbeatWatch:
    """A check whether one of several processes hangs; for one thread at a time.

    Args:
        names: name of each process in messages.
        paths: their heartbeat files.
        logs: where each process writes its stacks when it is killed.
        with_progress: calls that report progress; in others only heartbeats count.
        limit_s: seconds without a heartbeat. Also seconds without progress, unless ten times the
            slowest recent progress took longer.
        limit: config key of the limit.
    """

    def __init__(
        self,
        names: Sequence[str],
        paths: Sequence[Path],
        logs: Sequence[Path],
        *,
        with_progress: Sequence[str],
        limit_s: float,
        limit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = [
            _Watched(name=name, path=path, log=log)
            for name, path, log in zip(names, paths, logs, strict=True)
        ]
        self._with_progress = frozenset(with_progress)
        self._limit_s, self._limit = limit_s, limit
        self._clock = clock
        self._checked = clock()

    @property
    def progress(self) -> int:
        """Number of progress reports of all processes at the last check."""
        return sum(process.last.progress for process in self._watched)

    def check(self) -> None:
        """Read all heartbeats; raise ProcessHungError if a process sends none or makes no progress.

        The error names the process; if all wait for each other, those furthest behind.
        """
        now = self._clock()
        if now < self._checked + CHECK_S:
            return
        seconds, self._checked = min(now - self._checked, MAX_COUNTED_S), now
        for process in self._watched:
            process.update(seconds)
        silent = [process for process in self._watched if process.silent_s > self._limit_s]
        if silent:
            raise self._hung(silent, f"sent no heartbeat for {self._limit_s:g} s")
        busy = [process for process in self._watched if process.last.doing in self._with_progress]
        slowest_s = max((process.last.slowest_s for process in busy), default=0.0)
        allowed_s = max(self._limit_s, SLOWEST_FACTOR * slowest_s)
        if any(process.stalled_s > allowed_s for process in busy):
            fewest = min(process.last.progress for process in busy)
            behind = [process for process in busy if process.last.progress == fewest]
            raise self._hung(behind, f"made no progress for {allowed_s:g} s")

    def _hung(self, hung: Sequence[_Watched], what: str) -> ProcessHungError:
        names = ", ".join(process.name for process in hung)
        doing = f" in {hung[0].last.doing}" if hung[0].last.doing else ""
        logs = ", ".join(str(process.log) for process in hung)
        return ProcessHungError(f"{names} {what}{doing} ({self._limit}); stacks: {logs}")
