"""Ray's daemons, as a driver depends on them: whether they answer, and how to leave them if not.

Calls between processes go on without gcs_server, the control service, and without raylet, the
daemon of each node. But whoever asks one of them something, if only for room in the object store,
waits inside Ray, without an end and deaf to signals, while it is stopped.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from megadapo.cluster.watch.orphans import send
from megadapo.errors import ProcessHungError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ASK_S = 5.0
LIMIT_S = 60.0
"""Without an answer; about as long as Ray gives a node's daemon before it takes the node for dead.
And until a driver that stays in a call of Ray meanwhile is ended."""
LEAVE_S = 20.0
SILENT = (
    f"Ray's control service (gcs_server, on its head node) has not answered for {LIMIT_S:g} s: it "
    "is stopped, or its node is cut off"
)
LOST = (
    "Ray has given up the node of this driver: its daemon (raylet) is stopped, or the node is cut "
    "off from the cluster's head"
)
_LOGGER = logging.getLogger("megadapo.cluster")


def has_node(node_id: str) -> bool:
    """Ask the control service whether it still counts on a node."""
    import ray
    from ray.exceptions import RayError

    try:
        return all(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)
    except (RayError, RuntimeError, KeyError):
        # an error is an answer: that nobody answers is what is looked for
        return True


class MainThread:
    """Whether the main thread, which may be anywhere, stays in one and the same call of Ray."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._instruction = -1

    def stays_in_ray(self) -> bool:
        """Whether it is there still since the last call of this."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        before = self._frame, self._instruction
        # while it is kept, no other call has the same frame
        self._frame, self._instruction = frame, -1 if frame is None else frame.f_lasti
        if frame is None or before != (frame, frame.f_lasti):
            return False
        return str(frame.f_globals.get("__name__")).startswith("ray.")

    def forget(self) -> None:
        """Let go of what the thread was seen to do."""
        self._frame = None


def _end_process(problem: str) -> None:
    _LOGGER.error("%s, and this process waits for it: it ends", problem)
    logging.shutdown()
    os._exit(ProcessHungError.exit_code)


class ControlWatch:
    """Finds out in threads of its own whether Ray's daemons answer this process.

    Args:
        ask: returns when the control service has answered, and whether it has this node. It must
            not start Ray, as much of Ray's own interface does where there is none any more.
        end: ends a process that would wait for what does not answer, without an end.
        main: tells whether it does.
        every_s: between two questions.
    """

    def __init__(
        self,
        ask: Callable[[], bool],
        end: Callable[[str], None] = _end_process,
        *,
        main: MainThread | None = None,
        every_s: float = ASK_S,
    ) -> None:
        self._ask, self._end, self._every_s = ask, end, every_s
        self._main = main or MainThread()
        self._num_answers = self._seen = 0
        self._has_node = True
        self._silent_s = self._stuck_s = 0.0
        self._problem: str | None = None
        self._closed = threading.Event()
        for work in (self._ask_on, self._tick_on):
            threading.Thread(target=work, daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether asking a daemon something may be expected to come to an end."""
        return self._problem is None

    def look(self) -> None:
        """For whoever waits for processes, every few seconds.

        Raises:
            ProcessHungError: a daemon does not answer.
        """
        if self._problem is not None:
            raise ProcessHungError(self._problem)

    def tick(self) -> None:
        """Count an interval; what this process was stopped for is not counted so."""
        num_answers = self._num_answers
        self._silent_s = self._silent_s + self._every_s if num_answers == self._seen else 0.0
        self._seen = num_answers
        silent = SILENT if self._silent_s > LIMIT_S else None
        self._problem = silent or (None if self._has_node else LOST)
        if self._problem is None:
            self._main.forget()
            self._stuck_s = 0.0
            return
        self._stuck_s = self._stuck_s + self._every_s if self._main.stays_in_ray() else 0.0
        if self._stuck_s > LIMIT_S:
            self._end(self._problem)

    def close(self) -> None:
        """The process ends by itself: watch no more."""
        self._closed.set()

    def _ask_on(self) -> None:
        while not self._closed.wait(self._every_s):
            self._has_node = self._ask()
            self._num_answers += 1

    def _tick_on(self) -> None:
        while not self._closed.wait(self._every_s):
            self.tick()


def leave_ray(group: PlacementGroup, daemons: Mapping[int, str | None]) -> None:
    """Give the slots back and end this process's part in Ray, at once or after LEAVE_S.

    `daemons`: processes that were started for this one alone, by number, and when each started.
    """
    leaving = threading.Thread(target=_leave, args=(group,), daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    # one that was only stopped can still say goodbye; to go on hurts no other
    for last_resort in (signal.SIGCONT, signal.SIGKILL) if daemons else ():
        if not leaving.is_alive():
            return
        _LOGGER.warning("Ray does not answer as it is left: its daemons get %s", last_resort.name)
        send(daemons.items(), last_resort)
        leaving.join(LEAVE_S)
    if leaving.is_alive():
        import ray

        atexit.unregister(ray.shutdown)


def _leave(group: PlacementGroup) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    try:
        remove_placement_group(group)
    except RayError as error:
        _LOGGER.warning("Ray keeps the slots of this process until it has ended: %s", error)
    ray.shutdown()
