"""What of a bundle's bits has changed since they were sent last: about two bytes an element.

At the learning rates of RL a step changes a few percent of the bits of 16-bit weights, nearly all
of them by one unit in the last place. A section says where, as gaps of a byte each, and by how
much, as differences of the bits taken for an integer, in a byte each; what needs more is told apart
by a value of its own and follows. So a section gives exactly the bits that were encoded, NaN and
signed zeros included, to whoever has the bits before: it carries the versions of both.

A section is bytes: a header of 64-bit words, then gaps, steps, far gaps and replaced bits, each
part padded to `ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megadapo.errors import WeightError
from megadapo.weights.layout.cuts import round_up
from megadapo.weights.sync.buckets import checksum
from megadapo.weights.sync.plan import ALIGNMENT

MAGIC = int.from_bytes(b"mdelta01", "little")
NUM_HEADER_WORDS = 10
HEADER_BYTES = 8 * NUM_HEADER_WORDS
FAR = 255
"""In the place of a gap: it is in the list of far gaps."""
REPLACED = -128
"""In the place of a step: the element's bits are in the list of replaced ones."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Size of an element in bytes -> the integers that its bits are taken for."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which bits a section leads from and to."""

    base: int
    """Version that the receiver must have."""
    version: int
    """Version that it has afterwards."""
    place: int
    """Number of the transfer's bundle, so that no section is taken for another."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The elements of a bundle that a section changes."""

    places: torch.Tensor
    """[k] int64, ascending: numbers of the elements."""
    steps: torch.Tensor
    """[k] int8: what is added to their bits, or `REPLACED`."""
    bits: torch.Tensor
    """[k] words: the bits of those that are replaced, 0 elsewhere."""

    def between(self, start: int, stop: int) -> Changes:
        """The changes of elements `start` to `stop`, with places counted from `start`."""
        ends = torch.tensor([start, stop], device=self.places.device)
        low, high = torch.searchsorted(self.places, ends).tolist()
        return Changes(self.places[low:high] - start, self.steps[low:high], self.bits[low:high])

    def to(self, device: torch.device) -> Changes:
        """The same on another device."""
        return Changes(self.places.to(device), self.steps.to(device), self.bits.to(device))

    def after(self, before: torch.Tensor) -> torch.Tensor:
        """The bits of the changed elements, from those before."""
        # sums of a narrower type than int32 are not defined to wrap around
        stepped = (before.to(torch.int64) + self.steps).to(before.dtype)
        return torch.where(self.steps == REPLACED, self.bits, stepped)


def encode(
    before: torch.Tensor, after: torch.Tensor, stamp: Stamp, *, itemsize: int
) -> tuple[torch.Tensor | None, int]:
    """Encode what differs between two images of a bundle.

    Args:
        before: [n] bytes that the receiver has.
        after: [n] bytes that it is to have, on the same device.
        itemsize: bytes of an element: 1, 2 or 4.

    Returns:
        The section, None where it would not be smaller than the image itself; and how many
        elements differ.
    """
    old, new = before.view(_WORDS[itemsize]), after.view(_WORDS[itemsize])
    places = (old != new).nonzero().view(-1)
    count = len(places)
    if HEADER_BYTES + 2 * round_up(count, ALIGNMENT) >= len(after):
        return None, count
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    is_far = gaps >= FAR
    bits = new[places]
    steps = bits.to(torch.int64) - old[places]
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
    """Read a section; nothing that it says is used before all of it has been checked.

    Args:
        section: [m] bytes.
        stamp: what the section must say of itself.
        itemsize: bytes of an element.
        num_elements: elements of the bundle.

    Raises:
        WeightError: the section is damaged, cut short, or leads from or to other bits.
    """
    header = _read_header(section, stamp, itemsize, num_elements)
    count, num_far, num_replaced = header
    near, steps, far, replaced = _split(section, count, num_far, num_replaced, itemsize)
    is_far, is_replaced = near == FAR, steps == REPLACED
    found = torch.stack([is_far.sum(), is_replaced.sum(), (far < FAR).sum()]).tolist()
    if found != [num_far, num_replaced, 0]:
        raise WeightError(f"A delta's lists do not fit: {found} for {[num_far, num_replaced, 0]}.")
    gaps = near.to(torch.int64)
    gaps[is_far] = far.to(torch.int64)
    places = (gaps + 1).cumsum(0) - 1
    if count and int(places[-1]) >= num_elements:
        raise WeightError(f"A delta changes element {int(places[-1])} of {num_elements}.")
    bits = replaced.new_zeros(count)
    bits[is_replaced] = replaced
    return Changes(places, steps, bits)


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
        *(MAGIC, stamp.base, stamp.version, stamp.place, itemsize, num_elements),
        *(len(parts[0]), len(parts[2]), len(parts[3]), checksum(section[HEADER_BYTES:])),
    ]
    section[:HEADER_BYTES].copy_(torch.tensor(header).view(torch.uint8))
    return section


def _read_header(
    section: torch.Tensor, stamp: Stamp, itemsize: int, num_elements: int
) -> tuple[int, int, int]:
    """Lengths of the gaps, the far gaps and the replaced bits, after every check of the header."""
    if len(section) < HEADER_BYTES:
        raise WeightError(f"A delta of {len(section)} bytes is shorter than its header.")
    words: list[int] = section[:HEADER_BYTES].cpu().clone().view(torch.int64).tolist()
    names = ("magic", "base version", "version", "place", "element size", "number of elements")
    expected = (MAGIC, stamp.base, stamp.version, stamp.place, itemsize, num_elements)
    for name, found, right in zip(names, words, expected, strict=False):
        if found != right:
            raise WeightError(f"A delta has {name} {found}, but {right} is to be applied.")
    count, num_far, num_replaced, value = words[len(expected) :]
    if not (0 <= num_far <= count <= num_elements and 0 <= num_replaced <= count):
        raise WeightError(f"A delta changes {count} of {num_elements} elements, which cannot be.")
    lengths = [stop - start for start, stop in _ranges(count, num_far, num_replaced, itemsize)]
    num_bytes = HEADER_BYTES + sum(round_up(length, ALIGNMENT) for length in lengths)
    if num_bytes != len(section):
        raise WeightError(f"A delta has {len(section)} bytes and says that it has {num_bytes}.")
    if value != checksum(section[HEADER_BYTES:]):
        raise WeightError("A delta differs from its checksum.")
    return count, num_far, num_replaced


def _ranges(
    count: int, num_far: int, num_replaced: int, itemsize: int
) -> Iterator[tuple[int, int]]:
    """First and last byte of each part in the section."""
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
