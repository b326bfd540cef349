"""Topology of an update: the engines that read from each trainer rank, and the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megadapo.weights.sync.planning import Hosts

if TYPE_CHECKING:
    from megadapo.weights.sync.transports.interface import Transport

Device = tuple[str, str | None]
"""Node, and the GPU's name on it; None on a CPU."""


@dataclass(frozen=True)
class Topology:
    """The receivers, and the memory that they share with trainer ranks."""

    transport: Transport
    receiver_of: list[int]
    """Number of each engine's receiver."""
    receivers: list[str]
    """Name of the memory that each receiver reads."""
    sources: list[str] | None
    """Name of the memory that each trainer rank writes; None if it reaches every receiver."""
    hosts: Hosts

    @property
    def engines_per_receiver(self) -> tuple[int, ...]:
        """Number of engines of each receiver, if one forwards messages to the next."""
        is_chained = self.transport in ("nccl", "gloo")
        receivers = range(len(self.receivers)) if is_chained else ()
        return tuple(self.receiver_of.count(receiver) for receiver in receivers)

    @property
    def member_of_each(self) -> list[int]:
        """Number of each engine among the engines of its receiver."""
        return [self.receiver_of[:index].count(one) for index, one in enumerate(self.receiver_of)]


def find_topology(
    ranks: Sequence[Device],
    engine_nodes: Sequence[str],
    engine_gpus: Sequence[Sequence[str]],
) -> Topology:
    """Decide which engines read from which trainer ranks, and over which transport.

    Args:
        ranks: Node and GPU of every trainer rank.
        engine_nodes: Node of every engine.
        engine_gpus: GPUs of every engine; empty on a CPU.
    """
    devices: list[set[Device]] = [
        {(node, gpu) for gpu in gpus} for node, gpus in zip(engine_nodes, engine_gpus, strict=True)
    ]
    transport = _choose_transport(ranks, devices, engine_nodes)
    nodes = [node for node, _ in ranks]
    if transport != "cuda_ipc":
        # Engines on one node read the same memory, or forward messages to each other: every byte is
        # written once, or sent there once, for all of them.
        receivers = list(dict.fromkeys(engine_nodes))
        receiver_of = [receivers.index(node) for node in engine_nodes]
        sources = None if transport == "nccl" else nodes
        return Topology(transport, receiver_of, receivers, sources, Hosts(nodes, receivers))
    receiver_of = list(range(len(devices)))
    receivers = [f"engine {number}" for number in receiver_of]
    # A process can open memory only on its own engine's GPUs.
    sources = [
        next((name for name, own in zip(receivers, devices, strict=True) if rank in own), "")
        for rank in ranks
    ]
    return Topology(transport, receiver_of, receivers, sources, Hosts(nodes, engine_nodes))


def topology_beside_training(num_ranks: int, num_engines: int) -> Topology:
    """Return a topology that takes nothing from the trainer's devices and process groups.

    Messages go from main memory straight to the engines, since ranks that train cannot relay any.
    """
    here = ["here"]
    hosts = Hosts(here * num_ranks, here)
    return Topology("gloo", [0] * num_engines, here, None, hosts)


def _choose_transport(
    ranks: Sequence[Device], engines: Sequence[set[Device]], engine_nodes: Sequence[str]
) -> Transport:
    """Return a transport that engines read in place, or NCCL if some engine cannot.

    CUDA IPC needs a trainer rank on the engine's GPUs, shared memory one on its node.
    """
    if ranks[0][1] is None:
        nodes = {node for node, _ in ranks}
        return "shared_memory" if nodes.issuperset(engine_nodes) else "nccl"
    return "cuda_ipc" if all(own.intersection(ranks) for own in engines) else "nccl"
