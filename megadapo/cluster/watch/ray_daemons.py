"""Detects that Ray's daemons do not answer, and leaves Ray without them.

Calls between processes continue without gcs_server, the control service, and without raylet, the
daemon of each node. But a request to a stopped daemon, if only for space in the object store, waits
inside Ray forever and ignores signals.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from megadapo.cluster.watch.guard import send_signal
from megadapo.errors import ProcessHungError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PING_S = 5.0
LIMIT_S = 60.0
"""Seconds without an answer after which a daemon counts as hung, about as long as Ray waits before
it gives up a node. Also the seconds that the driver may then stay in one call of Ray."""
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
    """Ask the control service whether a node is alive; returns when it has answered."""
    import ray
    from ray.exceptions import RayError

    try:
        return all(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)
    except (RayError, RuntimeError, KeyError):
        # an error is an answer too: only silence counts
        return True


class MainThread:
    """The main thread's position: whether it stays in one call of Ray."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._instruction = -1

    def is_stuck_in_ray(self) -> bool:
        """Return whether the thread is in the same call of Ray as at the last check."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        before = self._frame, self._instruction
        # the reference keeps the frame object from being reused by another call
        self._frame, self._instruction = frame, -1 if frame is None else frame.f_lasti
        if frame is None or before != (frame, frame.f_lasti):
            return False
        return str(frame.f_globals.get("__name__")).startswith("ray.")

    def forget(self) -> None:
        """Release the last position."""
        self._frame = None


def _end_process(problem: str) -> None:
    _LOGGER.error("%s, and this process waits for it: it ends", problem)
    logging.shutdown()
    os._exit(ProcessHungError.exit_code)


class RayDaemonWatch:
    """A pair of threads that check whether Ray's daemons answer this process.

    Args:
        ping: returns once the control service has answered, and whether this node is alive. It must
            not start Ray, as many of Ray's own functions do if Ray does not run.
        end: ends this process if it would wait forever for a daemon.
        main: tells whether the main thread waits in Ray.
        every_s: seconds between two pings.
    """

    def __init__(
        self,
        ping: Callable[[], bool],
        end: Callable[[str], None] = _end_process,
        *,
        main: MainThread | None = None,
        every_s: float = PING_S,
    ) -> None:
        self._ping, self._end, self._every_s = ping, end, every_s
        self._main = main or MainThread()
        self._num_answers = self._seen = 0
        self._has_node = True
        self._silent_s = self._stuck_s = 0.0
        self._problem: str | None = None
        self._closed = threading.Event()
        for work in (self._keep_pinging, self._keep_counting):
            threading.Thread(target=work, daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether a request to a daemon can be expected to return."""
        return self._problem is None

    def check(self) -> None:
        """Raise if a daemon does not answer; call every few seconds while waiting for processes.

        Raises:
            ProcessHungError: the error names the daemon.
        """
        if self._problem is not None:
            raise ProcessHungError(self._problem)

    def tick(self) -> None:
        """Count an interval; time during which this process is suspended is not counted."""
        num_answers = self._num_answers
        self._silent_s = self._silent_s + self._every_s if num_answers == self._seen else 0.0
        self._seen = num_answers
        silent = SILENT if self._silent_s > LIMIT_S else None
        self._problem = silent or (None if self._has_node else LOST)
        if self._problem is None:
            self._main.forget()
            self._stuck_s = 0.0
            return
        self._stuck_s = self._stuck_s + self._every_s if self._main.is_stuck_in_ray() else 0.0
        if self._stuck_s > LIMIT_S:
            self._end(self._problem)

    def close(self) -> None:
        """Stop both threads."""
        self._closed.set()

    def _keep_pinging(self) -> None:
        while not self._closed.wait(self._every_s):
            self._has_node = self._ping()
            self._num_answers += 1

    def _keep_counting(self) -> None:
        while not self._closed.wait(self._every_s):
            self.tick()


def leave_ray(groups: Sequence[PlacementGroup], daemons: Mapping[int, str | None]) -> None:
    """Release the slots and disconnect from Ray, at the latest after LEAVE_S per attempt.

    `daemons`: start time by pid of the daemons that serve this process alone.
    """
    leaving = threading.Thread(target=_leave, args=(groups,), daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    # a daemon that is only stopped can still disconnect after SIGCONT, which harms no other
    for last_resort in (signal.SIGCONT, signal.SIGKILL) if daemons else ():
        if not leaving.is_alive():
            return
        _LOGGER.warning("Ray does not answer as it is left: its daemons get %s", last_resort.name)
        send_signal(daemons.items(), last_resort)
        leaving.join(LEAVE_S)
    if leaving.is_alive():
        import ray

        atexit.unregister(ray.shutdown)


def _leave(groups: Sequence[PlacementGroup]) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    try:
        for group in groups:
            remove_placement_group(group)
    except RayError as error:
        _LOGGER.warning("Ray keeps the slots of this process until it has ended: %s", error)
    ray.shutdown()
