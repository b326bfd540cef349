"""Ray's control service, gcs_server: whether it answers, and how to leave Ray where it does not.

Calls between processes go on without it, but whoever asks it something waits without an end.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from megadapo.errors import Hung

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ASK_S = 5.0
SILENT_S = 60.0
"""About as long as Ray gives a node's daemon before it takes the node for dead."""
COUNTED_S = 2 * ASK_S
"""Most seconds that count between two looks: who looks may have been stopped as well."""
LEAVE_S = 20.0
_LOGGER = logging.getLogger("megadapo.cluster")


def _ask() -> None:
    import ray
    from ray.exceptions import RayError

    # an error is an answer: that nobody answers is what is looked for
    with suppress(RayError):
        ray.nodes()


class ControlWatch:
    """Asks the control service again and again, in a thread that may hang with it."""

    def __init__(
        self,
        ask: Callable[[], None] = _ask,
        *,
        every_s: float = ASK_S,
        limit_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask`: returns when it has answered."""
        self._ask, self._every_s, self._limit_s, self._clock = ask, every_s, limit_s, clock
        self._answers = self._seen = 0
        self._looked, self._silent_s = clock(), 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._ask_on, daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether it was seen to give no answer for as long as is allowed."""
        return self._silent_s > self._limit_s

    def look(self) -> None:
        """See whether it has answered; for whoever waits for processes, every few seconds.

        Raises:
            Hung: not for too long.
        """
        now = self._clock()
        seconds, self._looked = min(now - self._looked, COUNTED_S), now
        answers = self._answers
        self._silent_s = self._silent_s + seconds if answers == self._seen else 0.0
        self._seen = answers
        if self.is_silent:
            raise Hung(
                f"Ray's control service (gcs_server, on its head node) has not answered for "
                f"{self._limit_s:g} s: it is stopped, or its node is cut off"
            )

    def close(self) -> None:
        self._closed.set()

    def _ask_on(self) -> None:
        while not self._closed.wait(self._every_s):
            self._ask()
            self._answers += 1


def leave_ray(group: PlacementGroup, daemons: Collection[int]) -> None:
    """Give the slots back and end this process's part in Ray, at once or after LEAVE_S.

    `daemons`: processes that were started for this one alone, killed where they do not answer.
    """
    leaving = threading.Thread(target=_leave, args=(group,), daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    if not leaving.is_alive():
        return
    _LOGGER.warning("Ray does not answer: it is left without a word")
    for pid in daemons:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if daemons:
        leaving.join(LEAVE_S)
    if leaving.is_alive():
        import ray

        atexit.unregister(ray.shutdown)


def _leave(group: PlacementGroup) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
    ray.shutdown()
