"""Addresses of nodes, and which network interface leads to another one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (linux/sockios.h)."""


def node_address() -> str:
    """This node's address in the Ray cluster, by which all of a run's processes tell nodes apart.

    Processes at one address share the node's memory. Loopback where Ray does not run.
    """
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK


def use_interface_towards(address: str) -> None:
    """Let Gloo and NCCL of this process talk over the interface that leads to an address.

    Gloo would take the one that the host's name resolves to and NCCL the first that is up; on a
    node with several, others may not be reached there. What the user has set stays.
    """
    name = interface_towards(address)
    if name is not None:
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)


def interface_towards(address: str) -> str | None:
    """Name of the interface whose address this node shows to `address`; None where none is found,
    as for IPv6."""
    try:
        own = _own_address(address)
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of(name) == own), None)


def _own_address(address: str) -> str:
    # nothing is sent: the kernel only looks up the route
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has no IPv4 address
        return socket.inet_ntoa(answer[20:24])
