"""Bytes that each torch operator reads and writes, counted from the tensors it is given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BytesMoved(TorchDispatchMode):
    """Counts while it is entered: `by_operator["aten::mm"]` is what all its calls moved.

    What an operator must move at least: every tensor in once, every result out once, caches left
    aside. Views move nothing; kernels called outside of torch's operators are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not _moves_nothing(func):
            tensors = tree_leaves((args, kwargs, results))
            self.by_operator[func._schema.name] += sum(
                tensor.numel() * tensor.element_size()
                for tensor in tensors
                if isinstance(tensor, torch.Tensor)
            )
        return results


def _moves_nothing(func: Any) -> bool:
    """Views, and memory that is allocated but not written."""
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty"))
