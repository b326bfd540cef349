"""A copy of the weights that a trainer rank sent in the last update, and the changes since then.

The copy is in main memory, pinned if the weights are on a GPU. It is as large as the rank's part of
the model in the engines' type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.delta.codec import Stamp, encode
from megadapo.weights.sync.plan import Transfer, UpdatePlan

ALWAYS_ENCODED = 1 << 20
"""Bytes that a rank may always encode, beyond its share. A rank that sends only norms, which are
small and change completely, would otherwise force a full update."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The header of a delta update, known to all ranks."""

    base: int
    """Version that every engine rank must have."""
    sizes: list[int]
    """Bytes of every transfer of the plan; the size of its bundle if that is sent as it is."""
    checksums: list[int]
    """Checksum of every transfer's new bits; empty if they are not compared."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The encoded sections of one trainer rank."""

    sizes: list[int]
    """Bytes of each transfer that this rank owns, in the plan's order."""
    checksums: list[int]
    """Checksums of their new bits; empty if not requested."""
    num_changed: int
    num_elements: int


def combine(plan: UpdatePlan, encoded: Sequence[Encoded], base: int) -> Delta:
    """Combine the sections of all trainer ranks, given by rank, into one delta."""
    sizes = [iter(piece.sizes) for piece in encoded]
    sums = [iter(piece.checksums) for piece in encoded]
    compares = any(piece.checksums for piece in encoded)
    return Delta(
        base=base,
        sizes=[next(sizes[transfer.owner]) for transfer in plan.transfers],
        checksums=[next(sums[transfer.owner]) for transfer in plan.transfers if compares],
    )


class DeltaState:
    """The bits of each bundle as engines have them, and the sections of the present update."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._images: dict[int, torch.Tensor] = {}
        self._sections: dict[int, torch.Tensor] = {}

    def keep(self, transfer: Transfer, image: torch.Tensor) -> None:
        """Store the bits of a bundle, [n] bytes with zeros between its slices."""
        key = bundle_number(transfer)
        if key not in self._images:
            pinned = torch.empty(len(image), dtype=torch.uint8, pin_memory=image.is_cuda)
            self._images[key] = pinned
        self._images[key].copy_(image)

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
        """Encode the changes of each bundle, and store its new bits as sent.

        Args:
            transfers: The transfers that this rank owns.
            image_of: Returns the present bits of a bundle, as for `keep`.
            max_share: Share of the bundles' bytes that sections may take.

        Returns:
            Sizes and checksums; None if the limit is exceeded, and all weights must be sent.
        """
        self.drop_sections()
        limit = ALWAYS_ENCODED + max_share * sum(len(image) for image in self._images.values())
        num_changed = num_elements = 0
        sums: dict[int, int] = {}
        for transfer in transfers:
            # engines of one shape get the same bundles
            key = bundle_number(transfer)
            if key not in self._sections:
                image, kept = image_of(transfer), self._images[key]
                stamp = Stamp(base, version, key)
                before = kept.to(image.device)
                section, count = encode(before, image, stamp, itemsize=self._itemsize)
                self._sections[key] = image if section is None else section
                kept.copy_(image)
                num_changed += count
                num_elements += len(image) // self._itemsize
                if with_checksums:
                    sums[key] = checksum(image)
                limit -= len(self._sections[key])
            if limit < 0:
                self.drop_sections()
                return None
        keys = [bundle_number(transfer) for transfer in transfers]
        return Encoded(
            sizes=[len(self._sections[key]) for key in keys],
            checksums=[sums[key] for key in keys] if with_checksums else [],
            num_changed=num_changed,
            num_elements=num_elements,
        )

    def section(self, transfer: Transfer) -> torch.Tensor:
        """Return the bytes to send for a transfer: a section, or the whole bundle."""
        return self._sections[bundle_number(transfer)]

    def drop_sections(self) -> None:
        """Free the sections of the last update."""
        self._sections = {}


def bundle_number(transfer: Transfer) -> int:
    """Return the block and bundle of a transfer as one number."""
    return transfer.block << 32 | transfer.bundle
