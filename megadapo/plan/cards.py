"""GPU models by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30
GPUS_PER_NODE = 8
MAIN_MEMORY_GIB = 2048
"""Main memory of a node of eight unless the user gives another, as in NVIDIA's DGX."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU model, by its data sheet, in a node of eight if it has links to other GPUs."""

    name: str
    device: str
    """Name in the driver."""
    memory_bytes: int
    """Total memory as torch reports it."""
    flops: float
    """Dense bf16 FLOP/s, summed in fp32."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second and direction between GPUs of a node."""
    network_bandwidth: float = 50e9
    """Bytes per second and direction of the GPU's share of the node's network, which no data sheet
    has: 400 Gb/s beside H100 to B200, 200 beside A100 and L40S, 10 in a workstation."""


def _card(
    name: str,
    device: str,
    gib: float,
    tflops: float,
    terabytes: float,
    link_gigabytes: float,
    network_gigabytes: float,
) -> Card:
    return Card(
        name=name,
        device=f"NVIDIA {device}",
        memory_bytes=int(gib * GIB),
        flops=tflops * 1e12,
        memory_bandwidth=terabytes * 1e12,
        link_bandwidth=link_gigabytes * 1e9,
        network_bandwidth=network_gigabytes * 1e9,
    )


_ALL = (
    _card("H100-80G", "H100 80GB HBM3", 79.1, 989, 3.35, 450, 50),
    _card("H200", "H200", 139.8, 989, 4.8, 450, 50),
    _card("B200", "B200", 178.4, 2250, 8.0, 900, 50),
    _card("A100-80G", "A100-SXM4-80GB", 79.1, 312, 2.04, 300, 25),
    _card("A100-40G", "A100-SXM4-40GB", 39.4, 312, 1.555, 300, 25),
    _card("L40S", "L40S", 44.4, 362, 0.864, 32, 25),
    _card("A6000", "RTX A6000", 47.5, 155, 0.768, 32, 1.25),
    _card("RTX-5090", "GeForce RTX 5090", 31.4, 209, 1.79, 64, 1.25),
    _card("RTX-4090", "GeForce RTX 4090", 23.6, 165, 1.01, 32, 1.25),
    _card("RTX-3090", "GeForce RTX 3090", 23.6, 71, 0.936, 32, 1.25),
)
CARDS = {card.name: card for card in _ALL}
"""The cards by name. PCIe has 32 GB/s, or 64 with its fifth version."""
H100, H200 = CARDS["H100-80G"], CARDS["H200"]


def card_of(device: str) -> Card | None:
    """Return the card with this name in its driver; None for an unknown one, such as PCIe."""
    return next((card for card in CARDS.values() if card.device == device), None)
