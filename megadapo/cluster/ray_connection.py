"""Starts Ray on this machine, or joins a Ray cluster that runs already."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.processes import descendants
from megadapo.cluster.watch.guard import kill_after_this_process, start_time
from megadapo.errors import ConfigError, InfraError

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_PROBE_TIMEOUT_S = 120.0
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


def connect_to_ray(config: ClusterConfig, num_slots: int) -> dict[int, str | None]:
    """Start or join Ray, unless this process is connected to it already.

    Returns:
        Start time by pid of the daemons that end with this process; empty for a joined cluster.

    Raises:
        ConfigError: the cluster to join needs no token, or `cluster.device` is auto and only the
            nodes have GPUs.
        InfraError: there is no cluster at the address, it refuses this process, or only this
            machine has GPUs so far.
    """
    import ray

    if ray.is_initialized():
        return {}
    if config.address is None:
        return _start_ray(num_slots)
    with _own_sigterm_handler():
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
    return {}


def join_cluster(address: str) -> None:
    """Make this process a driver of a cluster.

    Args:
        address: of Ray's head as HOST:PORT; "auto" on a node of the cluster.

    Raises:
        InfraError: there is no cluster, or it refuses this process.
    """
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise InfraError(
            f"no Ray cluster at {address} takes this process ({error}): docs/clusters.md says how "
            "to start one"
        ) from None


def accepts_without_token() -> bool:
    """Return whether the joined cluster admits processes without a token.

    This process's own token proves nothing: a cluster without tokens ignores it.

    Raises:
        InfraError: the cluster does not answer.
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
    """Check that `auto`, which looks at this machine, is right for the joined cluster.

    Args:
        num_gpus: of the cluster.

    Raises:
        ConfigError: the cluster has GPUs, and this machine has none.
        InfraError: this machine has a GPU, and no node of the cluster has offered one yet.
    """
    if config.device == "auto" and config.uses_cuda != (num_gpus > 0):
        here = "has a GPU" if config.uses_cuda else "has no GPU that torch can use"
        # nodes that are still to join bring GPUs, but nothing brings one to this machine
        error = InfraError if config.uses_cuda else ConfigError
        raise error(
            f'cluster.device = "auto" looks at this machine, which {here}, but the nodes of the '
            f'Ray cluster offer {num_gpus:g}: set it to "cpu" or "cuda"'
        )


def _start_ray(num_slots: int) -> dict[int, str | None]:
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    # Ray binds 127.0.0.1, as on desktops; by default it takes the network's address
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes it starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # this process has read the variable already
    # every user of this machine reaches loopback; only this process and its children see the token,
    # and not the file in the home folder that Ray would write for everyone to read
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # this process has read the mode already, and a token too if it ran another Ray before
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    # a process without a GPU share sees no GPU, instead of all of them
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    # the control service would store the duration of every call, which is never read
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray's default of 15 lets trainer and engines starve beside any other program
    os.environ.setdefault("RAY_worker_niceness", "0")
    before = set(descendants(os.getpid()))
    # slots are logical: more processes than cores is legal on a laptop
    num_cpus = max(num_slots, os.cpu_count() or 1)
    with _own_sigterm_handler():
        # without "local" Ray would join any cluster that this machine happens to be a node of
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **_QUIET)
    daemons = set(descendants(os.getpid())) - before
    kill_after_this_process(daemons)
    return {pid: start_time(pid) for pid in daemons}


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
