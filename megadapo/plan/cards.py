"""GPU models by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30
GPUS_PER_NODE = 8
MAIN_MEMORY_GIB = 2048
"""Main memory of a node of eight unless the user gives another, as in NVIDIA's DGX."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU model in a node of eight, by its data sheet."""

    name: str
    device: str
    """Name in the driver."""
    memory_bytes: int
    """Total memory as torch reports it."""
    flops: float
    """Dense bf16 FLOP/s."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second and direction between GPUs of a node."""
    network_bandwidth: float = 50e9
    """Bytes per second and direction of the GPU's own 400 Gb/s network card."""


H100 = Card(
    name="H100-80G",
    device="NVIDIA H100 80GB HBM3",
    memory_bytes=int(79.1 * GIB),
    flops=989e12,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
)
H200 = Card(
    name="H200",
    device="NVIDIA H200",
    memory_bytes=int(139.8 * GIB),
    flops=989e12,
    memory_bandwidth=4.8e12,
    link_bandwidth=450e9,
)
A100 = Card(
    name="A100-80G",
    device="NVIDIA A100-SXM4-80GB",
    memory_bytes=int(79.1 * GIB),
    flops=312e12,
    memory_bandwidth=2.04e12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
)
CARDS = {card.name: card for card in (H100, H200, A100)}


def card_of(device: str) -> Card | None:
    """Return the card with this name in its driver; None for an unknown one, such as PCIe."""
    return next((card for card in CARDS.values() if card.device == device), None)
