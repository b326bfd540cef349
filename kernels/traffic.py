"""What our own kernels tell a profile: the bytes they read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_meters: list[Counter[str]] = []


@contextmanager
def metered(meter: Counter[str]) -> Iterator[None]:
    """Add what every kernel moves to `meter`, under the name that a profile has for it."""
    _meters.append(meter)
    try:
        yield
    finally:
        _meters.remove(meter)


def moved(kernel: str, *tensors: Tensor | None) -> None:
    """Say at a launch which tensors the kernel goes through once."""
    for meter in _meters:
        meter[kernel] += sum(tensor.nbytes for tensor in tensors if tensor is not None)
