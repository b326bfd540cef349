"""Which engines can read from which trainer ranks, and by what transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.weights.sync.planning import Hosts

Device = tuple[str, str | None]
"""Node, and what it calls the GPU; None on a CPU."""


@dataclass(frozen=True)
class Places:
    """Where trainer ranks and engines meet."""

    transport: str
    numbers: list[int]
    """Number of the receiver that each engine is."""
    receivers: list[str]
    """Place of each receiver."""
    sources: list[str] | None
    """Place of each trainer rank; None where it can reach every receiver."""
    hosts: Hosts
    """Node of each trainer rank and receiver."""
    hands_on: bool = False
    """Whether the engines of a receiver hand on to each other what the first is sent; where not,
    they read the same memory."""

    @property
    def copies(self) -> tuple[int, ...]:
        """How many engines each receiver is, where one hands on to the next."""
        receivers = range(len(self.receivers))
        return tuple(self.numbers.count(one) for one in receivers) if self.hands_on else ()

    @property
    def copy_of_each(self) -> list[int]:
        """Which of its receiver's engines each engine is."""
        return [self.numbers[:index].count(one) for index, one in enumerate(self.numbers)]


def find_places(
    transport: str,
    ranks: Sequence[Device],
    engine_nodes: Sequence[str],
    engine_gpus: Sequence[Sequence[str]],
) -> Places:
    """Decide who reads where.

    Args:
        transport: The `weights.transport` setting; "auto" is resolved here.
        ranks: Node and GPU of every trainer rank.
        engine_nodes: Node of every engine.
        engine_gpus: GPUs of every engine; empty on a CPU.
    """
    devices: list[set[Device]] = [
        {(node, gpu) for gpu in gpus} for node, gpus in zip(engine_nodes, engine_gpus, strict=True)
    ]
    if transport == "auto":
        transport = _choose_transport(ranks, devices, engine_nodes)
    nodes = [node for node, _ in ranks]
    if transport == "folder":
        # all engines read the same files
        folder = ["folder"]
        return Places(transport, [0] * len(devices), folder, None, Hosts(nodes, folder))
    if transport != "cuda_ipc":
        # Engines on one node read the same memory or hand on what one of them gets: every byte is
        # written once, or sent there once, for all of them.
        receivers = list(dict.fromkeys(engine_nodes))
        numbers = [receivers.index(node) for node in engine_nodes]
        is_sent = transport == "nccl"
        sources = None if is_sent else nodes
        hosts = Hosts(nodes, receivers)
        return Places(transport, numbers, receivers, sources, hosts, hands_on=is_sent)
    numbers = list(range(len(devices)))
    receivers = [f"engine {number}" for number in numbers]
    # A process can open memory on the GPUs it sees, which are the engine's own.
    sources = [
        next((name for name, own in zip(receivers, devices, strict=True) if rank in own), "")
        for rank in ranks
    ]
    return Places(transport, numbers, receivers, sources, Hosts(nodes, engine_nodes))


def _choose_transport(
    ranks: Sequence[Device], engines: Sequence[set[Device]], engine_nodes: Sequence[str]
) -> str:
    """What engines can read in place, where every engine has a trainer rank beside it.

    That is on its GPUs for CUDA IPC, on its node for the shared memory of CPUs.
    """
    if ranks[0][1] is None:
        nodes = {node for node, _ in ranks}
        return "shared_memory" if nodes.issuperset(engine_nodes) else "nccl"
    return "cuda_ipc" if all(own.intersection(ranks) for own in engines) else "nccl"
