"""Failures of a reward function or an environment, counted by their reason."""

from __future__ import annotations

import logging
import threading
from collections import Counter

logger = logging.getLogger(__name__)

MAX_REASONS = 50
"""Number of different failures that are counted separately."""
MAX_TOLD = 5
"""Number of failures that one warning lists."""


class FailureCounts:
    """The failures of one function or environment; safe to use from any thread."""

    def __init__(self, name: str) -> None:
        """`name`: kind and name of what fails, as in "reward function judge"."""
        self._name = name
        self._all: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, failure: str, prompt_id: str) -> None:
        """Count a failure on a response to a prompt; log it if its reason is new."""
        with self._lock:
            is_known = failure in self._all or len(self._all) >= MAX_REASONS
            reason = failure if failure in self._all or not is_known else "other reasons"
            self._all[reason] += 1
            self._unreported[reason] += 1
        if not is_known:
            logger.warning("%s, prompt %s: %s", self._name, prompt_id, failure)

    def drain_warning(self, given: str, *others: str) -> str | None:
        """Return one line on the failures since the last call, if there were any.

        Args:
            given: what the responses got instead of a score.
            others: what else to tell, before the failures.
        """
        with self._lock:
            failures, self._unreported = self._unreported, Counter()
        parts = [*others]
        if failures:
            reasons = "; ".join(f"{n} x {reason}" for reason, n in failures.most_common(MAX_TOLD))
            parts.append(f"failed on {failures.total()} responses, which {given}: {reasons}")
        return f"{self._name} {'; it '.join(parts)}" if parts else None
