"""What a trainer rank sent last, from which it tells what has changed since.

The bits are kept in main memory, pinned where the weights are on a GPU: once more the size of what
the rank sends, which is its part of the model, in the engines' type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.delta.codec import Stamp, encode
from megadapo.weights.sync.plan import Plan, Transfer

ALWAYS_ENCODED = 1 << 20
"""Bytes that a rank may encode however little it has to send: norms alone change in full."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What all ranks must know of an update that sends only what changed."""

    base: int
    """Version that every engine rank must have."""
    sizes: list[int]
    """Bytes of every transfer of the plan; of one that is sent as it is, as many as its bundle."""
    checksums: list[int]
    """Of the bits that every transfer leads to; empty: they are not compared."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What one trainer rank has to send."""

    sizes: list[int]
    """Bytes of each transfer that has its origin here, in the plan's order."""
    checksums: list[int]
    """Of the bits that each of them leads to, if asked for."""
    num_changed: int
    num_elements: int


def delta_of(plan: Plan, encoded: Sequence[Encoded], base: int) -> Delta:
    """Put together what the trainer ranks, by rank, have to send."""
    sizes = [iter(one.sizes) for one in encoded]
    sums = [iter(one.checksums) for one in encoded]
    compares = any(one.checksums for one in encoded)
    return Delta(
        base=base,
        sizes=[next(sizes[transfer.origin]) for transfer in plan.transfers],
        checksums=[next(sums[transfer.origin]) for transfer in plan.transfers if compares],
    )


class SentBundles:
    """The bits of each bundle as an engine has them, and the sections of the present update."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._images: dict[tuple[int, int], torch.Tensor] = {}
        self._sections: dict[tuple[int, int], torch.Tensor] = {}

    def keep(self, transfer: Transfer, image: torch.Tensor) -> None:
        """Remember the bits of a bundle, [n] bytes with zeros between its slices."""
        kept = self._images.get(bundle_key(transfer))
        if kept is None:
            kept = torch.empty(len(image), dtype=torch.uint8, pin_memory=image.is_cuda)
            self._images[bundle_key(transfer)] = kept
        kept.copy_(image)

    def encode(
        self,
        transfers: Sequence[Transfer],
        image_of: Callable[[Transfer], torch.Tensor],
        *,
        base: int,
        version: int,
        max_share: float,
        with_checksums: bool,
    ) -> Encoded | None:
        """Encode what changed in each bundle since it was sent last, and remember it as sent.

        Args:
            transfers: those that have their origin here.
            image_of: the present bits of a bundle, as for `keep`.
            max_share: of the bundles' bytes that sections may take.

        Returns:
            What is to be sent; None where it is too much, and everything must be sent in full.
        """
        self.forget_sections()
        limit = ALWAYS_ENCODED + max_share * sum(len(image) for image in self._images.values())
        counts: dict[tuple[int, int], tuple[int, int]] = {}
        sums: dict[tuple[int, int], int] = {}
        for transfer in transfers:
            # engines of one shape get the same bundles
            key = bundle_key(transfer)
            if key not in counts:
                image = image_of(transfer)
                counts[key] = self._encode_one(transfer, image, base, version)
                if with_checksums:
                    sums[key] = checksum(image)
                limit -= len(self._sections[key])
            if limit < 0:
                self.forget_sections()
                return None
        keys = [bundle_key(transfer) for transfer in transfers]
        return Encoded(
            sizes=[len(self._sections[key]) for key in keys],
            checksums=[sums[key] for key in keys] if with_checksums else [],
            num_changed=sum(changed for changed, _ in counts.values()),
            num_elements=sum(elements for _, elements in counts.values()),
        )

    def section(self, transfer: Transfer) -> torch.Tensor:
        """What is sent of a transfer: a section, or the bundle as it is."""
        return self._sections[bundle_key(transfer)]

    def forget_sections(self) -> None:
        """Give back what the last update took beside the kept bits."""
        self._sections = {}

    def _encode_one(
        self, transfer: Transfer, image: torch.Tensor, base: int, version: int
    ) -> tuple[int, int]:
        """How many elements differ, of how many."""
        key = bundle_key(transfer)
        kept = self._images[key]
        stamp = Stamp(base, version, place_of(transfer))
        section, count = encode(kept.to(image.device), image, stamp, itemsize=self._itemsize)
        self._sections[key] = image if section is None else section
        kept.copy_(image)
        return count, len(image) // self._itemsize


def bundle_key(transfer: Transfer) -> tuple[int, int]:
    """What of the model a transfer carries, whichever engine it goes to."""
    return transfer.block, transfer.bundle


def place_of(transfer: Transfer) -> int:
    """The same as one number."""
    return transfer.block << 32 | transfer.bundle
