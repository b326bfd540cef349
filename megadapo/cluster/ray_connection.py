"""Starts Ray on this machine or joins a Ray cluster, watches its daemons, and leaves Ray.

Calls between processes continue without gcs_server, the control service, and without raylet, the
daemon of each node. But a request to a stopped daemon, if only for space in the object store, waits
inside Ray forever and ignores signals. So silent daemons are detected, and Ray is left without
them.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.local_ray import QUIET, LocalRay
from megadapo.cluster.watch.guard import send_signal
from megadapo.errors import ConfigError, InfraError, ProcessDiedError, ProcessHungError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


_PROBE_TIMEOUT_S = 120.0
RECONNECT_S = 86400
"""Seconds for which Ray lets a process work without its control service."""
_REFUSED, _ADMITTED = "refused", "admitted"
_PROBE = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError

try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    print("{_REFUSED}")
else:
    print("{_ADMITTED}")
"""


def connect_to_ray(config: ClusterConfig, num_slots: int) -> LocalRay | None:
    """Start or join Ray, unless this process is connected to it already.

    Return the Ray that this process has started; None for a joined cluster. Raise ConfigError if
    the cluster to join needs no token, InfraError if none is at the address or it refuses this
    process.
    """
    import ray
    from ray._raylet import Config  # type: ignore[attr-defined]

    if ray.is_initialized():
        return None
    # Ray would end this process a minute after the control service, before the run is saved
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    with _own_sigterm_handler():
        if config.address is None:
            # slots are logical: more processes than cores is legal on a laptop
            return LocalRay(max(num_slots, os.cpu_count() or 1))
        Config.initialize("")  # this process may have read the variables already
        join_cluster(config.address)
    if not config.allow_unauthenticated and accepts_without_token():
        ray.shutdown()
        raise ConfigError(
            f"cluster.address = {config.address}: this Ray cluster needs no token, so anyone who "
            "reaches it can run code on its nodes: start Ray with RAY_AUTH_MODE=token "
            "(docs/clusters.md), or set cluster.allow_unauthenticated = true if the network is "
            "private"
        )
    check_device(config, ray.cluster_resources().get("GPU", 0))
    return None


def join_cluster(address: str) -> None:
    """Make this process a driver of the cluster whose head is at HOST:PORT, or "auto" on its node.

    Raise InfraError if there is no cluster, or if it refuses this process.
    """
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise InfraError(
            f"no Ray cluster at {address} takes this process ({error}): docs/clusters.md says how "
            "to start one"
        ) from None


def accepts_without_token() -> bool:
    """Return whether the joined cluster admits processes without a token.

    This process's own token proves nothing: a cluster without tokens ignores it.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
    try:
        # in a process of its own, since Ray reads its token once a process
        result = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, address],
            env=environment | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(
            f"{address} did not say in {_PROBE_TIMEOUT_S:.0f} s who may join"
        ) from None
    answer = result.stdout.strip()
    if answer not in (_REFUSED, _ADMITTED):
        raise InfraError(f"{address} did not say who may join it: {result.stderr.strip()[-500:]}")
    return answer == _ADMITTED


def check_device(config: ClusterConfig, num_gpus: float) -> None:
    """Check that `auto`, which looks at this machine, is right for a cluster with so many GPUs.

    Raise ConfigError if only the cluster has GPUs, and InfraError if only this machine has any so
    far.
    """
    if config.device == "auto" and config.uses_cuda != (num_gpus > 0):
        here = "has a GPU" if config.uses_cuda else "has no GPU that torch can use"
        # nodes that are still to join bring GPUs, but nothing brings one to this machine
        error = InfraError if config.uses_cuda else ConfigError
        raise error(
            f'cluster.device = "auto" looks at this machine, which {here}, but the nodes of the '
            f'Ray cluster offer {num_gpus:g}: set it to "cpu" or "cuda"'
        )


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Restore the program's SIGTERM handler, if it has one; Ray's raises SystemExit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        # Ray's handler got a signal for the program
        if callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        if callable(before):
            signal.signal(signal.SIGTERM, before)


PING_S = 2.0
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
DIED = (
    "has ended: it was killed, by the kernel for its memory (dmesg) or by `ray stop`, or its own "
    "log says why (logs/ray in the run's folder)"
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
        every_s: seconds between two pings.
    """

    def __init__(
        self,
        ping: Callable[[], bool],
        end: Callable[[str], None] = _end_process,
        *,
        lost_daemon: Callable[[], str | None] = lambda: None,
        every_s: float = PING_S,
    ) -> None:
        self._ping, self._end, self._every_s = ping, end, every_s
        self._lost_daemon = lost_daemon
        self._frame: FrameType | None = None
        self._instruction = -1
        """Position of the main thread at the last check."""
        self._num_answers = self._seen = 0
        self._has_node = True
        self._silent_s = self._stuck_s = 0.0
        self.before_end: Callable[[str], object] = lambda problem: None
        """Receives the reason before this process is ended."""
        self._problem: InfraError | None = None
        self._closed = threading.Event()
        for work in (self._keep_pinging, self._keep_counting):
            threading.Thread(target=work, daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether a request to a daemon can be expected to return."""
        return self._problem is None

    def check(self) -> None:
        """Raise InfraError if a daemon does not answer; call it every few seconds of a wait."""
        if self._problem is not None:
            raise self._problem

    def tick(self) -> None:
        """Count an interval; time during which this process is suspended is not counted."""
        num_answers = self._num_answers
        self._silent_s = self._silent_s + self._every_s if num_answers == self._seen else 0.0
        self._seen = num_answers
        limit_s, dead = LIMIT_S, self._lost_daemon()
        if dead is not None:
            # it answers no request, however long this process waits
            limit_s, self._problem = LEAVE_S, ProcessDiedError(f"{dead} {DIED}")
        elif self._silent_s > LIMIT_S:
            self._problem = ProcessHungError(SILENT)
        else:
            self._problem = None if self._has_node else ProcessHungError(LOST)
        if self._problem is None:
            self._frame, self._stuck_s = None, 0.0
            return
        self._stuck_s = self._stuck_s + self._every_s if self.is_stuck_in_ray() else 0.0
        if self._stuck_s > limit_s:
            self.before_end(f"{type(self._problem).__name__}: {self._problem}")
            self._end(str(self._problem))

    def is_stuck_in_ray(self) -> bool:
        """Return whether the main thread is in the same call of Ray as at the last check."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        before = self._frame, self._instruction
        # the reference keeps the frame object from being reused by another call
        self._frame, self._instruction = frame, -1 if frame is None else frame.f_lasti
        if frame is None or before != (frame, frame.f_lasti):
            return False
        return str(frame.f_globals.get("__name__")).startswith("ray.")

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


def watch_daemons(local: LocalRay | None) -> RayDaemonWatch:
    """Watch the daemons of the Ray that this process is connected to."""
    import ray

    ping = functools.partial(has_node, ray.get_runtime_context().get_node_id())
    if local is None:
        return RayDaemonWatch(ping)
    return RayDaemonWatch(ping, lost_daemon=local.lost_daemon)


def leave_ray(groups: Sequence[PlacementGroup], local: LocalRay | None) -> None:
    """Release the slots and disconnect from Ray, at the latest after LEAVE_S per attempt.

    `local`: the Ray that this process has started, which ends.
    """
    # slots of a Ray that ends need no request, which its control service may not answer
    leaving = threading.Thread(target=_leave, args=([] if local else groups,), daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    # a daemon that is only stopped can still disconnect after SIGCONT, which harms no other
    for last_resort in (signal.SIGCONT, signal.SIGKILL):
        if local is None or not leaving.is_alive():
            break
        _LOGGER.warning("Ray does not answer as it is left: its daemons get %s", last_resort.name)
        send_signal(local.processes.items(), last_resort)
        leaving.join(LEAVE_S)
    if leaving.is_alive():
        import ray

        atexit.unregister(ray.shutdown)
        # Ray's own asks the control service before it prints an error
        sys.excepthook = sys.__excepthook__
    if local is not None:
        local.end()


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
