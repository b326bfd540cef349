"""Scores of given tokens that engines still compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.errors import ProcessDiedError
from megadapo.rollout.pool.handle import WATCH_S, EngineHandle, EngineIncarnation
from megadapo.rollout.types import ScoreRequest

if TYPE_CHECKING:
    from ray import ObjectRef

LATE_S = 30.0
"""Seconds that an engine has to report that it gave the scores up."""


class PendingScores:
    """Calls of engines that all score the same tokens.

    It waits for its own calls only, so another thread may use the engines meanwhile.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        requests: Sequence[ScoreRequest],
        *,
        wait_s: float,
        check: Callable[[], None],
    ) -> None:
        """Call the engines.

        Args:
            wait_s: seconds after which an engine gives its scores up.
            check: called every few seconds of waiting; notices dead engines.
        """
        self._deadline = time.monotonic() + wait_s + LATE_S
        self._check = check
        self._calls: dict[ObjectRef[Any], tuple[EngineHandle, EngineIncarnation]] = {
            engine.actor.score.remote(list(requests), wait_s): (engine, engine.incarnation)
            for engine in engines
        }
        self.warnings: list[str] = []
        """One line for each engine that gave no scores."""

    def result(self) -> list[list[np.ndarray]]:
        """Wait for the engines, and return the log-probs of each request per engine that answered.

        An engine that dies meanwhile, or has no free slot in time, is left out with a warning.
        """
        import ray

        found: list[list[np.ndarray]] = []
        while self._calls:
            left = self._deadline - time.monotonic()
            ready, _ = ray.wait(list(self._calls), timeout=max(0.0, min(left, WATCH_S)))
            for call in ready:
                engine, _ = self._calls.pop(call)
                scores = self._read(engine, call)
                if scores is None:
                    self._warn(engine)
                else:
                    found.append(scores)
            if not ready:
                self._check()
                self._leave_out_dead(is_late=left <= 0)
        return found

    def _read(self, engine: EngineHandle, call: ObjectRef[Any]) -> list[np.ndarray] | None:
        try:
            scores: list[np.ndarray] | None = engine.read(call, "score")
        except ProcessDiedError:
            return None  # the engine's next report tells the pool
        return scores

    def _leave_out_dead(self, *, is_late: bool) -> None:
        """Wait no longer for engines whose process has ended; if it is late, for no engine."""
        for call, (engine, incarnation) in list(self._calls.items()):
            is_same = engine.incarnation == incarnation and engine.state == "serving"
            if is_late or not is_same:
                del self._calls[call]
                self._warn(engine)

    def _warn(self, engine: EngineHandle) -> None:
        self.warnings.append(
            f"{engine.name} died or had no free slot: its weights are not compared with the "
            "trainer's in this step (parity/probe_abs_*)"
        )
