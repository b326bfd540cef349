"""Compares answers symbolically in the background, for statistics only.

If the workers fall behind, pairs that still wait are dropped when the next batch comes, so only a
sample is cross-checked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from megadapo.errors import InfraError
from megadapo.rewards.symbolic import Pair, SymbolicPool

CHUNK = 8
"""Number of pairs that the workers get at a time, so that they rarely wait for each other."""
MAX_REMEMBERED = 65_536
"""Number of results that are kept; the oldest are forgotten."""


_POOL_ERRORS = (InfraError, OSError, LookupError, TypeError, ValueError)
"""Errors of a pool whose workers fail or send malformed replies."""


class CrossCheck:
    """A thread that compares pairs with a pool of workers; safe to use from any thread.

    If the workers cannot be restarted, there are no further results and no errors.
    """

    def __init__(self, pool: SymbolicPool, on_result: Callable[[Pair, bool | None], None]) -> None:
        """`on_result`: called in the thread with each pair and its result."""
        self._pool = pool
        self._on_result = on_result
        self._waiting: deque[Pair] = deque()
        self._results: dict[Pair, bool | None] = {}
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self.failure: str | None = None
        """Reason why comparing has stopped."""
        self._thread = threading.Thread(target=self._work, name="cross-check", daemon=True)
        self._thread.start()

    def ask(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Compare different pairs in this order; return the pairs dropped for them.

        If comparing has stopped, all pairs are returned.
        """
        with self._changed:
            if self.failure is not None:
                return list(pairs)
            dropped = list(self._waiting)
            self._waiting = deque(pairs)
            self._changed.notify_all()
        return dropped

    def result(self, pair: Pair) -> bool | None:
        """Return whether a pair is equal; None if that is unknown, or not known yet."""
        return self._results.get(pair)

    def finish(self, timeout_s: float) -> None:
        """Wait until all pairs are compared, at most `timeout_s`."""
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
            except _POOL_ERRORS as error:
                self._fail(error)
                return

    def _next_chunk(self) -> list[Pair]:
        """Wait for pairs to compare; return none once this is closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return []
            self._is_busy = True
            return [self._waiting.popleft() for _ in range(min(CHUNK, len(self._waiting)))]

    def _compare(self, chunk: list[Pair]) -> None:
        new = [pair for pair in chunk if pair not in self._results]
        if new:
            self._results.update(zip(new, self._pool.check_batch(new), strict=True))
            while len(self._results) > MAX_REMEMBERED:
                del self._results[next(iter(self._results))]
        for pair in chunk:
            self._on_result(pair, self._results.get(pair))

    def _fail(self, error: Exception) -> None:
        """Stop comparing; an error while the pool is closed on purpose is no failure."""
        with self._changed:
            if not self._is_closed:
                self.failure = str(error)
            self._waiting.clear()
            self._is_busy = False
            self._changed.notify_all()
