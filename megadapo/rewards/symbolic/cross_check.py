"""Symbolic verdicts that nothing waits for: compared in the background, and remembered.

Whoever is behind is not caught up with: pairs that still wait when the next ones come are given
up, so what is compared then is a sample.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from megadapo.errors import InfraError
from megadapo.rewards.symbolic.symbolic import Pair, SymbolicPool

CHUNK = 8
"""Pairs that the workers are given at a time: they need not wait for each other after each one."""
MAX_REMEMBERED = 65_536
"""Pairs whose verdicts are kept; the oldest are forgotten."""


_ENDING = (InfraError, OSError, LookupError, TypeError, ValueError)
"""What a pool whose workers fail, or reply with anything at all, can raise."""


class CrossCheck:
    """A thread that has pairs compared by a pool of workers; safe to use from any thread.

    Where the workers fail for good, there are no more verdicts, and whoever asks is not troubled.
    """

    def __init__(self, pool: SymbolicPool, tell: Callable[[Pair, bool | None], None]) -> None:
        """`tell`: is called for each pair that was asked about, in the thread, with its verdict."""
        self._pool = pool
        self._tell = tell
        self._waiting: deque[Pair] = deque()
        self._verdicts: dict[Pair, bool | None] = {}
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self.failure: str | None = None
        """Why nothing is compared any more."""
        self._thread = threading.Thread(target=self._work, name="second-opinion", daemon=True)
        self._thread.start()

    def ask(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Have different pairs compared in this order, and return those given up for them, or all
        of them where nothing is compared any more."""
        with self._changed:
            if self.failure is not None:
                return list(pairs)
            given_up = list(self._waiting)
            self._waiting = deque(pairs)
            self._changed.notify_all()
        return given_up

    def verdict(self, pair: Pair) -> bool | None:
        """Return whether a pair is equal; None where that is not known, or not yet."""
        return self._verdicts.get(pair)

    def finish(self, timeout_s: float) -> None:
        """Wait until nothing is left to compare, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._is_busy), timeout_s)

    def close(self) -> None:
        """End the thread and its workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.close()
        self._thread.join()

    def _work(self) -> None:
        while chunk := self._next_chunk():
            try:
                self._compare(chunk)
            except _ENDING as error:
                self._fail(error)
                return

    def _next_chunk(self) -> list[Pair]:
        """Pairs to compare, as soon as there are some; none once this is closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return []
            self._is_busy = True
            return [self._waiting.popleft() for _ in range(min(CHUNK, len(self._waiting)))]

    def _compare(self, chunk: list[Pair]) -> None:
        new = [pair for pair in chunk if pair not in self._verdicts]
        if new:
            self._remember(zip(new, self._pool.check_batch(new), strict=True))
        for pair in chunk:
            self._tell(pair, self._verdicts.get(pair))

    def _remember(self, verdicts: Iterable[tuple[Pair, bool | None]]) -> None:
        self._verdicts.update(verdicts)
        while len(self._verdicts) > MAX_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]

    def _fail(self, error: Exception) -> None:
        """End; a pool that is being closed is no failure."""
        with self._changed:
            if not self._is_closed:
                self.failure = str(error)
            self._waiting.clear()
            self._is_busy = False
            self._changed.notify_all()
