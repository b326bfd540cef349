"""Full tensors, read slice by slice from a Hugging Face folder into a rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from megadapo.errors import WeightError
from megadapo.models.folder import read_json
from megadapo.weights.disk.headers import check_headers, read_headers
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.layout.shards import Shard, ShardPosition

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class TensorSource(Protocol):
    """Full tensors by their Hugging Face names, readable in part."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Read positions `start` to `stop` along `axis` of one tensor, and no more than that."""


class SafetensorsFolder:
    """The tensors of safetensors files, each name in exactly one of them."""

    def __init__(self, folder: Path | str) -> None:
        self.headers = read_headers(Path(folder))
        tensors = self.headers.tensors
        files = {header.file for header in tensors.values()}
        self._handles = {path: safe_open(path, framework="pt", device="cpu") for path in files}
        self.shapes = {name: header.shape for name, header in tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: _TORCH_DTYPES[one.dtype] for name, one in self.headers.tensors.items()}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        piece = self._handles[self.headers.tensors[name].file].get_slice(name)
        tensor: torch.Tensor = piece[start:stop] if axis == 0 else piece[:, start:stop]
        return tensor


def open_layout(folder: Path | str) -> ModelLayout:
    """Return the layout of the model whose config.json is in `folder`."""
    return layout_for(read_json(Path(folder) / "config.json"))


def open_weights(folder: Path | str, layout: ModelLayout) -> SafetensorsFolder:
    """Open the weights of a folder after comparing their headers with the layout."""
    source = SafetensorsFolder(folder)
    check_headers(source.headers, layout)
    return source


def match_params(
    params: Mapping[str, torch.Tensor], layout: ModelLayout, position: ShardPosition
) -> list[tuple[Shard, torch.Tensor]]:
    """Pair every shard of a rank with its parameter.

    Raises WeightError naming parameters that are unknown, missing or of another shape.
    """
    pairs, unknown, problems = [], set(params), []
    for shard in layout.megatron_shards(position):
        name = shard.name if shard.name in params else shard.alias
        if name is None or name not in params:
            problems.append(f"{shard.name} is missing from the model")
            continue
        unknown.discard(name)
        if tuple(params[name].shape) != shard.shape:
            problems.append(
                f"{name} has shape {list(params[name].shape)}, its layout says {list(shard.shape)}"
            )
        pairs.append((shard, params[name]))
    problems += [f"{name} of the model is not in the layout" for name in sorted(unknown)]
    if problems:
        raise WeightError("; ".join(problems[:10]) + ".")
    return pairs


@torch.no_grad()
def fill_shard(param: torch.Tensor, shard: Shard, source: TensorSource) -> None:
    """Copy a shard's spans out of `source` into `param` and zero the padding."""
    filled = 0
    for offset, span in shard.placed_spans():
        piece = source.read(span.tensor, shard.axis, span.start, span.stop)
        param.narrow(shard.axis, offset, span.size).copy_(piece)
        filled = offset + span.size
    if filled < shard.length:
        param.narrow(shard.axis, filled, shard.length - filled).zero_()


@torch.no_grad()
def collect_spans(full: Mapping[str, torch.Tensor], shard: Shard, local: torch.Tensor) -> None:
    """Copy a shard's spans out of `local` into their full tensors."""
    for offset, span in shard.placed_spans():
        target = full[span.tensor].narrow(shard.axis, span.start, span.size)
        target.copy_(local.narrow(shard.axis, offset, span.size))
