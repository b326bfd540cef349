"""Updates that send only the elements that changed since the last one, in about two bytes each.

At the learning rates of RL, a step changes a few percent of the 16-bit weights, nearly all of them
by one unit in the last place. The encoded bytes are a section. It has two bytes per changed
element: the gap, which is the number of unchanged elements before it, and the step, which is the
difference of its bits as integers. A larger gap or step has a marker in its byte; the gap, or the
element's new bits, follow in a list. So every bit is reproduced, NaN and signed zeros included.

A section starts with a header of 64-bit words, among them the checksum of all others and of what
follows, and the versions before and after. Gaps, steps, far gaps and replaced bits follow, each
part padded to `ALIGNMENT`.

A trainer rank keeps a copy of the weights that it sent in the last update. It is in main memory,
pinned if the weights are on a GPU, and as large as the rank's part of the model in the engines'
type.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megadapo.errors import WeightError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.layout.cuts import round_up
from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.plan import ALIGNMENT, Transfer, UpdatePlan

MAGIC = int.from_bytes(b"mdelta01", "little")
NUM_HEADER_WORDS = 10
HEADER_BYTES = 8 * NUM_HEADER_WORDS
FAR = 255
"""Marker of a gap that is in the list of far gaps."""
REPLACED = -128
"""Marker of a step whose element is in the list of replaced bits."""

MAX_DELTA = 0.25
"""Share of a full update's bytes above which a delta is sent as a full update."""
FULL_EVERY = 50
"""Interval of full updates among delta updates."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Size of an element in bytes -> the integer type of its bits."""
ALWAYS_ENCODED = 1 << 20
"""Bytes that a rank may always encode, beyond its share. A rank that sends only norms, which are
small and change completely, would otherwise force a full update."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The bundle and the two versions that a section belongs to."""

    base: int
    """Version that the receiver must have."""
    version: int
    """Version after the update."""
    bundle: int
    """Number of the transfer's bundle, so that sections cannot be mixed up."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changed elements of a bundle."""

    indices: torch.Tensor
    """Numbers of the elements, [k] int64, ascending."""
    steps: torch.Tensor
    """Differences of their bits, or `REPLACED`, [k] int8."""
    bits: torch.Tensor
    """New bits of replaced elements, 0 elsewhere, [k] words."""

    def split(self, ranges: Sequence[tuple[int, int]]) -> list[Changes]:
        """Return the changes of the elements of each range, with indices from its start."""
        ends = torch.tensor(ranges, device=self.indices.device)
        # one wait for the device, not one for each range
        return [
            Changes(self.indices[low:high] - start, self.steps[low:high], self.bits[low:high])
            for (start, _), (low, high) in zip(
                ranges, torch.searchsorted(self.indices, ends).tolist(), strict=True
            )
        ]

    def to(self, device: torch.device) -> Changes:
        return Changes(self.indices.to(device), self.steps.to(device), self.bits.to(device))

    def after(self, before: torch.Tensor) -> torch.Tensor:
        """Return the new bits of the changed elements, given their old bits."""
        # sums of a narrower type than int32 are not defined to wrap around
        stepped = (before.to(torch.int64) + self.steps).to(before.dtype)
        return torch.where(self.steps == REPLACED, self.bits, stepped)


def encode(
    before: torch.Tensor, after: torch.Tensor, stamp: Stamp, *, itemsize: int
) -> tuple[torch.Tensor | None, int]:
    """Encode the differences between two images of a bundle, [n] bytes on one device.

    Return the section, or None if it would not be smaller than the image; and the number of changed
    elements. `before` are the receiver's bytes.
    """
    old, new = before.view(_WORDS[itemsize]), after.view(_WORDS[itemsize])
    indices = (old != new).nonzero().view(-1)
    count = len(indices)
    if HEADER_BYTES + 2 * round_up(count, ALIGNMENT) >= len(after):
        return None, count
    gaps = indices.diff(prepend=indices.new_tensor([-1])) - 1
    is_far = gaps >= FAR
    bits = new[indices]
    steps = bits.to(torch.int64) - old[indices]
    is_replaced = steps.abs() > 127
    parts = [
        gaps.clamp(max=FAR).to(torch.uint8),
        steps.masked_fill(is_replaced, REPLACED).to(torch.int8),
        gaps[is_far].to(torch.int32),
        bits[is_replaced],
    ]
    section = _assemble(parts, stamp, itemsize, len(new))
    return (section if len(section) < len(after) else None), count


def decode(section: torch.Tensor, stamp: Stamp, *, itemsize: int, num_elements: int) -> Changes:
    """Return the changes of a section of bytes [m].

    Raise WeightError if it is damaged, cut short, or has another stamp than `stamp`.
    """
    count, num_far, num_replaced = _read_header(section, stamp, itemsize, num_elements)
    near, steps, far, replaced = _split(section, count, num_far, num_replaced, itemsize)
    gaps = near.to(torch.int64)
    gaps[near == FAR] = far.to(torch.int64)
    indices = (gaps + 1).cumsum(0) - 1
    bits = replaced.new_zeros(count)
    bits[steps == REPLACED] = replaced
    return Changes(indices, steps, bits)


def _assemble(
    parts: list[torch.Tensor], stamp: Stamp, itemsize: int, num_elements: int
) -> torch.Tensor:
    sizes = [round_up(part.nbytes, ALIGNMENT) for part in parts]
    section = torch.zeros(HEADER_BYTES + sum(sizes), dtype=torch.uint8, device=parts[0].device)
    start = HEADER_BYTES
    for part, size in zip(parts, sizes, strict=True):
        section[start : start + part.nbytes].copy_(part.view(torch.uint8))
        start += size
    header = [
        *(MAGIC, stamp.base, stamp.version, stamp.bundle, itemsize, num_elements),
        *(len(parts[0]), len(parts[2]), len(parts[3])),
    ]
    section[8:HEADER_BYTES].copy_(torch.tensor(header).view(torch.uint8))
    section[:8].copy_(torch.tensor([checksum(section[8:])]).view(torch.uint8))
    return section


def _read_header(
    section: torch.Tensor, stamp: Stamp, itemsize: int, num_elements: int
) -> tuple[int, int, int]:
    """Check the header; return the numbers of gaps, far gaps and replaced bits."""
    if len(section) < HEADER_BYTES:
        raise WeightError(f"A delta of {len(section)} bytes is shorter than its header.")
    words: list[int] = section[:HEADER_BYTES].cpu().clone().view(torch.int64).tolist()
    value = words.pop(0)
    names = ("magic", "base version", "version", "bundle", "element size", "number of elements")
    expected = (MAGIC, stamp.base, stamp.version, stamp.bundle, itemsize, num_elements)
    for name, found, right in zip(names, words, expected, strict=False):
        if found != right:
            raise WeightError(f"A delta has {name} {found}, but the update has {right}.")
    count, num_far, num_replaced = words[len(expected) :]
    lengths = [stop - start for start, stop in _ranges(count, num_far, num_replaced, itemsize)]
    num_bytes = HEADER_BYTES + sum(round_up(length, ALIGNMENT) for length in lengths)
    if num_bytes != len(section):
        raise WeightError(f"A delta has {len(section)} bytes, but its header says {num_bytes}.")
    if value != checksum(section[8:]):
        raise WeightError("A delta differs from its checksum.")
    return count, num_far, num_replaced


def _ranges(
    count: int, num_far: int, num_replaced: int, itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yield the first and last byte of each part of a section."""
    start = HEADER_BYTES
    for length in (count, count, 4 * num_far, itemsize * num_replaced):
        yield start, start + length
        start += round_up(length, ALIGNMENT)


def _split(
    section: torch.Tensor, count: int, num_far: int, num_replaced: int, itemsize: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if section.storage_offset() % ALIGNMENT:
        section = section.clone()
    near, steps, far, replaced = (
        section[start:stop] for start, stop in _ranges(count, num_far, num_replaced, itemsize)
    )
    return near, steps.view(torch.int8), far.view(torch.int32), replaced.view(_WORDS[itemsize])


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

        Return sizes and checksums; None if the limit is exceeded, and all weights must be sent.

        Args:
            transfers: The transfers that this rank owns.
            image_of: Returns the present bits of a bundle, as for `keep`.
            max_share: Share of the bundles' bytes that sections may take.
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


class UpdateVersions:
    """The versions of a connection's updates: which one every engine has, which were verified.

    A policy version is not enough: it can be published twice, and by two publishers.
    """

    def __init__(self, config: WeightsConfig, *, deltas: bool) -> None:
        self.deltas = deltas
        """Whether updates may send only the changes."""
        self._config = config
        self._num_unverified = 0
        """Updates since the last verified one, over any connection."""
        self.reset()

    def reset(self) -> None:
        """Start the versions of a new connection; random, so that no other one has them."""
        self._newest = secrets.randbits(40) << 20
        self._base: int | None = None
        self._is_first = True
        self._num_since_full = 0

    @property
    def base(self) -> int | None:
        """Version that a delta can be sent from; None if all weights must be sent."""
        is_due = self._num_since_full + 1 >= FULL_EVERY
        return self._base if self.deltas and not is_due else None

    def all_have_base(self, current: Mapping[int, Sequence[int | None]]) -> bool:
        """Return whether every rank of every engine has the base of a delta.

        `current`: version of each rank's weights, by engine.
        """
        return all(version == self.base for ranks in current.values() for version in ranks)

    def verifies(self, *, in_full: bool) -> bool:
        """Return whether the present update compares checksums."""
        mode = self._config.verify
        if mode in ("every", "off"):
            return mode == "every"
        is_due = isinstance(mode, int) and self._num_unverified + 1 >= mode
        return is_due or self._is_first or (self.deltas and in_full)

    def begin(self) -> int:
        """Allocate a version. No engine's base version is trusted until the update completes."""
        self._newest += 1
        self._base = None
        return self._newest

    def finish(self, version: int, *, in_full: bool) -> None:
        """Record that every engine has the version."""
        self._num_unverified = 0 if self.verifies(in_full=in_full) else self._num_unverified + 1
        self._base, self._is_first = version, False
        self._num_since_full = 0 if in_full else self._num_since_full + 1
