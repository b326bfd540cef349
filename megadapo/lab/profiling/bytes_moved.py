"""Bytes that each operator and kernel must read and write, counted while it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadapo.kernels.traffic import metered

_WRITE_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Operators whose first tensor is a result only."""
_LOOKUPS = ("aten::index_select", "aten::gather", "aten::embedding", "aten::index")
"""Operators that read as much of their first tensor as they return."""


@contextmanager
def bytes_moved() -> Iterator[Counter[str]]:
    """Count what is called within: name in a profile -> bytes of all its calls.

    What must move at least: every tensor in once, every result out once, caches left aside. Views
    move nothing.
    """
    meter: Counter[str] = Counter()
    with metered(meter), _OperatorMeter(meter):
        yield meter


class _OperatorMeter(TorchDispatchMode):
    def __init__(self, meter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it out
        self._meter = meter

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not _moves_nothing(func):
            written = _bytes_of(results)
            inputs = [*args, *(value for key, value in (kwargs or {}).items() if key != "out")]
            if name in _LOOKUPS:
                read = written + _bytes_of(inputs[1:])
            else:
                read = _bytes_of(inputs[1:] if name in _WRITE_ONLY else inputs)
            self._meter[name] += read + written
        return results


def _bytes_of(values: Any) -> int:
    leaves = tree_leaves(values)
    return sum(tensor.nbytes for tensor in leaves if isinstance(tensor, torch.Tensor))


def _moves_nothing(func: Any) -> bool:
    """Views, and memory that is allocated but not written."""
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty"))
