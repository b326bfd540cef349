"""Facts about the node of this process: its address, network interface, clock and GPUs."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CLOCK_READINGS = 8
"""Number of times that another clock is read; the fastest reading is the most precise one."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (linux/sockios.h)."""


def node_address() -> str:
    """Return this node's address in the Ray cluster; loopback if Ray does not run.

    Processes with the same address are on the same node and share its memory.
    """
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK


def use_interface_towards(address: str) -> None:
    """Make Gloo and NCCL of this process use the interface that leads to an address.

    By default Gloo takes the interface of the host's name and NCCL the first that is up. Other
    nodes may not be reachable there. Variables that the user has set are kept.
    """
    name = interface_towards(address)
    if name is not None:
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)


def interface_towards(address: str) -> str | None:
    """Return the name of the interface that leads to `address`; None if unknown, as for IPv6."""
    try:
        # nothing is sent: the kernel only looks up the route
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has no IPv4 address
        return socket.inet_ntoa(answer[20:24])


def has_gpu() -> bool:
    """Return whether this process can see an NVIDIA GPU, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    # /dev/dxg is the GPU inside Windows' Linux
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists():
        return True
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.startswith(b"GPU")


ClockReading: TypeAlias = tuple[str, int]
"""The boot of a machine, whose containers all share one clock, and its nanoseconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """Nanoseconds by which another clock is ahead of this one."""

    ahead_ns: int
    error_ns: int
    """Uncertainty: half of the duration of the fastest reading."""


def read_clock() -> ClockReading:
    """Read the clock of this process's node."""
    return this_machine(), time.time_ns()


def this_machine() -> str:
    """Return the id of this boot of the machine, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def pid_namespace() -> str:
    """Return the machine's boot and the namespace in which this process's pid has a meaning."""
    return f"{this_machine()} {os.stat('/proc/self/ns/pid').st_ino}"


def clock_offset(read_other: Callable[[], ClockReading]) -> ClockOffset:
    """Compare this clock with the one that `read_other` reads; exactly 0 if they are the same.

    A reading is compared with the midpoint of request and reply, as NTP does (RFC 5905).
    """
    here = this_machine()
    best: ClockOffset | None = None
    for _ in range(CLOCK_READINGS):
        sent = time.time_ns()
        machine, time_ns = read_other()
        answered = time.time_ns()
        if machine == here:
            return ClockOffset(ahead_ns=0, error_ns=0)
        error = (answered - sent) // 2
        if best is None or error < best.error_ns:
            best = ClockOffset(ahead_ns=time_ns - sent - error, error_ns=error)
    assert best is not None
    return best
