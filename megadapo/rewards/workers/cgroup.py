"""Limits memory and processes of a sandbox as a whole, by a control group (cgroups(7), version 2).

RLIMIT_AS limits each process alone, and counts no files in memory. A group counts all of it, but a
user may create one only where the system has delegated that, as systemd does for its users.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from megadapo.rewards.workers.isolation import MAX_PROCESSES

_CONTROLLERS = frozenset({"memory", "pids"})
_PREFIX = "megadapo-"
_LIMITS = {
    "memory.max": "{memory_bytes}",
    # swapped pages count as memory that is free again; a kernel without swap has no such file
    "memory.swap.max": "0",
    # the sandbox itself is two processes, and threads count
    "pids.max": f"{MAX_PROCESSES + 8}",
}
"""Limits of a group by the name of their file."""
REMOVE_S = 0.1
"""Time that the last processes of a group may take to end."""

logger = logging.getLogger(__name__)


def find_parent(proc: Path = Path("/proc/self")) -> Path | None:
    """Return the group in which this process may create others; None if the system has none.

    Candidates are this process's own group and the one above it. Groups that a killed driver has
    left there are removed.
    """
    for group in _candidates(proc):
        try:
            if not set((group / "cgroup.subtree_control").read_text().split()) >= _CONTROLLERS:
                continue
            for left in group.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError):
                    left.rmdir()  # the kernel refuses it if the group has processes
            (probe := group / f"{_PREFIX}{uuid.uuid4().hex[:12]}").mkdir()
            probe.rmdir()
        except OSError:
            continue
        return group
    logger.info(
        "memory_mib limits each process of a sandbox, and not their sum: no control group with "
        "memory and pids is delegated to this user"
    )
    return None


def enclose(process_id: int, parent: Path | None, memory_bytes: int) -> Path | None:
    """Move a sandbox into a new group with limits; None without a parent, or if it is refused."""
    if parent is None:
        return None
    group = parent / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
        for name, limit in _LIMITS.items():
            is_optional = name == "memory.swap.max"
            with contextlib.suppress(OSError) if is_optional else contextlib.nullcontext():
                (group / name).write_text(limit.format(memory_bytes=memory_bytes))
        (group / "cgroup.procs").write_text(str(process_id))
    except OSError as error:
        logger.warning("a sandbox has no control group: %s", error)
        remove(group)
        return None
    return group


def remove(group: Path | None) -> None:
    """Kill the processes of a group and remove it, or leave it to the next `find_parent`."""
    if group is None:
        return
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + REMOVE_S
    while time.monotonic() < deadline:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.002)
        else:
            return


def _candidates(proc: Path) -> Iterator[Path]:
    try:
        mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
        own = [line[3:] for line in (proc / "cgroup").read_text().splitlines() if line[:3] == "0::"]
    except OSError:
        return
    for _, point, kind, *_ in mounts:
        if kind == "cgroup2" and own:
            group = Path(f"{point}/{os.path.relpath(own[0], '/')}")
            yield group
            if group != Path(point):
                yield group.parent
