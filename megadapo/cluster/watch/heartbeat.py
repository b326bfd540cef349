"""Signs of life of a process: that it runs, what it does and how far it is with that.

They are in a small file beside the process's log, which is read by whoever waits for the process.
Only changes count, so the clocks of two nodes may differ.
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

BEAT_S = 2.0
"""Between two beats, at most."""
BEATS_PER_LIMIT = 4
MULTIPLE = 10.0
"""How much longer than the slowest recent one a piece of work may take before it hangs."""
RECENT_CALLS = 8
LOOK_S = 1.0
"""Between two looks, at least."""
COUNTED_S = 5.0
"""Most seconds that count between two looks: who reads may have been stopped as well."""
_RECORD_BYTES = 192


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What a process says of itself."""

    beats: int = 0
    doing: str = ""
    """What it was called for; empty between calls."""
    pieces: int = 0
    """Pieces of work done since it began."""
    slowest_s: float = 0.0
    """Longest time from one piece to the next in the present call and in recent ones like it."""


class Heart:
    """Writes this process's pulse into a file, from a thread of its own."""

    def __init__(self, path: Path, *, limit_s: float) -> None:
        """`limit_s`: after so many seconds without a beat the process counts as hung."""
        self._beats, self._pieces, self._doing = 0, 0, ""
        self._since = time.monotonic()
        self._slowest = self._slowest_before = 0.0
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_CALLS))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        every_s = min(BEAT_S, limit_s / BEATS_PER_LIMIT)
        threading.Thread(target=self._beat, args=(every_s,), daemon=True).start()

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Say what is done in this block."""
        recent = self._recent[doing]
        self._since, self._slowest = time.monotonic(), 0.0
        self._slowest_before, self._doing = max(recent, default=0.0), doing
        try:
            yield
        finally:
            self._doing = ""
            self._took_until_now()
            recent.append(self._slowest)

    def piece(self) -> None:
        """A piece of it is done."""
        self._took_until_now()
        self._pieces += 1

    def pulse(self) -> Pulse:
        """What the file says next; called by any thread."""
        doing = self._doing
        slowest_s = max(self._slowest, self._slowest_before) if doing else 0.0
        return Pulse(beats=self._beats, doing=doing, pieces=self._pieces, slowest_s=slowest_s)

    def _took_until_now(self) -> None:
        now = time.monotonic()
        self._slowest, self._since = max(self._slowest, now - self._since), now

    def _beat(self, every_s: float) -> None:
        wait = threading.Event().wait
        while not wait(every_s):
            self._beats += 1
            record = json.dumps(asdict(self.pulse())).ljust(_RECORD_BYTES - 1) + "\n"
            # in place: it needs no room on a full disk. A folder that is away for long is silence
            with contextlib.suppress(OSError):
                os.pwrite(self._file, record.encode(), 0)


_hearts: list[Heart] = []
"""This process's, once it has one."""


def start_heart(path: Path, *, limit_s: float) -> None:
    """Let this process give signs of life in a file from here on."""
    _hearts[:] = [Heart(path, limit_s=limit_s)]


@contextmanager
def at_work(doing: str) -> Iterator[None]:
    """Say what this process does in this block."""
    with _hearts[0].at(doing) if _hearts else contextlib.nullcontext():
        yield


def piece_done() -> None:
    """Say that this process has got on."""
    for heart in _hearts:
        heart.piece()


def read_pulse(path: Path) -> Pulse | None:
    """A process's last sign of life; None where there is none, or it is being written."""
    try:
        return Pulse(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def all_beat(paths: Sequence[Path]) -> bool:
    """Whether each process gives another sign of life, within the time of a few beats."""
    before = [read_pulse(path) for path in paths]
    deadline = time.monotonic() + BEATS_PER_LIMIT * BEAT_S
    while any(read_pulse(path) == pulse for path, pulse in zip(paths, before, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(BEAT_S / 10)
    return True


def _place(pulse: Pulse) -> tuple[str, int]:
    return pulse.doing, pulse.pieces


@dataclass(kw_only=True)
class _Watched:
    name: str
    path: Path
    log: Path
    last: Pulse | None = None
    silent_s: float = 0.0
    """For how long it was seen without a beat."""
    still_s: float = 0.0
    """For how long it was seen to do the same piece of work."""

    def look(self, seconds: float) -> None:
        last, pulse = self.last, read_pulse(self.path) or self.last
        beat = pulse is not None and last is not None and pulse.beats != last.beats
        self.silent_s = 0.0 if beat else self.silent_s + seconds
        stays = pulse is not None and last is not None and _place(pulse) == _place(last)
        self.still_s = self.still_s + seconds if stays else 0.0
        self.last = pulse


class PulseWatch:
    """Tells of several processes whether one hangs; for one thread at a time.

    Args:
        names: what each is called in messages.
        paths: of their pulses.
        logs: where each leaves its stacks when it is ended.
        in_pieces: what they do in pieces; of anything else only the beats count.
        limit_s: seconds without a beat or, in what is done in pieces and where ten times the
            slowest recent one took no longer, without a piece.
        limit: the key of the configuration that says so.
        clock: seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        paths: Sequence[Path],
        logs: Sequence[Path],
        *,
        in_pieces: Sequence[str],
        limit_s: float,
        limit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = [
            _Watched(name=name, path=path, log=log)
            for name, path, log in zip(names, paths, logs, strict=True)
        ]
        self._in_pieces, self._limit_s, self._limit = frozenset(in_pieces), limit_s, limit
        self._clock = clock
        self._looked = clock()

    @property
    def num_pieces(self) -> int:
        """Pieces of work that all have done, as far as was seen."""
        return sum(one.last.pieces for one in self._watched if one.last is not None)

    def look(self) -> None:
        """Read all pulses.

        Raises:
            ProcessHungError: a process sends no heartbeat or makes no progress. The error names it;
                if all wait for each other, it names those furthest behind.
        """
        now = self._clock()
        if now < self._looked + LOOK_S:
            return
        seconds, self._looked = min(now - self._looked, COUNTED_S), now
        for one in self._watched:
            one.look(seconds)
        silent = [one for one in self._watched if one.silent_s > self._limit_s]
        if silent:
            raise self._hung(silent, f"gave no sign of life for {self._limit_s:g} s")
        busy = [one for one in self._watched if one.last and one.last.doing in self._in_pieces]
        slowest_s = max((one.last.slowest_s for one in busy if one.last), default=0.0)
        allowed_s = max(self._limit_s, MULTIPLE * slowest_s)
        if any(one.still_s > allowed_s for one in busy):
            fewest = min(one.last.pieces for one in busy if one.last)
            behind = [one for one in busy if one.last and one.last.pieces == fewest]
            raise self._hung(behind, f"did not get on for {allowed_s:g} s")

    def _hung(self, who: Sequence[_Watched], what: str) -> ProcessHungError:
        names = ", ".join(one.name for one in who)
        last = who[0].last
        doing = "" if last is None or not last.doing else f" in {last.doing}"
        logs = ", ".join(str(one.log) for one in who)
        return ProcessHungError(f"{names} {what}{doing} ({self._limit}); stacks: {logs}")
