"""Joining a Ray cluster that somebody has started, and finding out whom else it lets in."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

from megadapo.errors import InfraError

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Ray's lines are left out, but for errors."""
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
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise InfraError(
            f"no Ray cluster at {address} takes this process ({error}): docs/clusters.md says how "
            "to start one"
        ) from None


def admits_strangers() -> bool:
    """Whether the cluster that this process has joined lets in one that shows no token.

    A token of this process says nothing: a cluster that asks for none takes everybody.

    Raises:
        InfraError: it could not be asked.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    try:
        # Ray reads once in a process whether it shows a token
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, address],
            env=_without_token(),
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(
            f"{address} did not say in {_PROBE_TIMEOUT_S:.0f} s who may join"
        ) from None
    answer = asked.stdout.strip()
    if answer not in (_REFUSED, _ADMITTED):
        raise InfraError(f"{address} did not say who may join it: {asked.stderr.strip()[-500:]}")
    return answer == _ADMITTED


def _without_token() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    return kept | {"RAY_AUTH_MODE": "disabled"}
