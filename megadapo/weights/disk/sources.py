"""Full tensors, read slice by slice from a Hugging Face folder into a rank's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megadapo.errors import WeightError
from megadapo.models.shape import CONFIG_KEYS
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.layout.shards import Shard, ShardPosition

INDEX_NAME = "model.safetensors.index.json"
METADATA_FILE = ".metadata"
"""File of megatron-core's checkpoints that says where each tensor is."""
OLD_MANIFEST = "megatron.json"
"""File of the folders that earlier versions of `megadapo convert hf-to-megatron` wrote."""

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
    """The tensors of safetensors files, each name in exactly one of them.

    Args:
        folder: Folder of the files, or one file.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._handles = {path: _open(path) for path in self._files()}
        self._file_of: dict[str, Path] = {}
        for path, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._file_of:
                    raise WeightError(f"{path}: {name} is also in {self._file_of[name].name}.")
                self._file_of[name] = path

    def _files(self) -> list[Path]:
        if self.folder.suffix == ".safetensors" and not self.folder.is_dir():
            return [self.folder]
        if (self.folder / OLD_MANIFEST).is_file():
            raise WeightError(
                f"{self.folder} has megadapo's old Megatron format, which is not read any more: "
                "use the Hugging Face folder that it was converted from"
            )
        index = self.folder / INDEX_NAME
        if not index.is_file():
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                is_megatron = (self.folder / METADATA_FILE).is_file()
                hint = "; write its Hugging Face folder with `megadapo convert megatron-to-hf`"
                raise WeightError(f"{self.folder} has no .safetensors file{hint * is_megatron}.")
            return files
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightError(f"{index} has no weight_map with the file of each tensor.")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if Path(name).name != name or not (self.folder / name).is_file():
                raise WeightError(f"{index} names {name!r}, which is not a file beside it.")
        return [self.folder / name for name in names]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        names = {name: self._slice(name).get_dtype() for name in self._file_of}
        for dtype in names.values():
            if dtype not in _TORCH_DTYPES:
                raise WeightError(
                    f"Tensors of type {dtype} cannot be trained; convert the checkpoint."
                )
        return {name: _TORCH_DTYPES[dtype] for name, dtype in names.items()}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        piece = self._slice(name)
        tensor: torch.Tensor = piece[start:stop] if axis == 0 else piece[:, start:stop]
        return tensor

    def _slice(self, name: str) -> Any:  # safetensors has no name for its type
        if name not in self._file_of:
            raise WeightError(f"{self.folder} has no tensor {name}.")
        return self._handles[self._file_of[name]].get_slice(name)


def open_layout(folder: Path | str) -> ModelLayout:
    """Return the layout of the model whose config.json is in `folder`."""
    return layout_for(read_json(Path(folder) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a WeightError names a file that has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path} does not hold a JSON object.")
    return value


def check_tensors(source: TensorSource, layout: ModelLayout, where: object) -> None:
    """Compare names and shapes of `source` with the layout.

    Raises WeightError that names every missing, unknown or misshapen tensor (the first ten).
    """
    found, expected = dict(source.shapes), layout.hf_shapes
    if layout.shape.tied:
        _drop_tied_head(source, found, layout, where)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not in the layout" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, config.json says {list(shape)} "
        f"({', '.join(CONFIG_KEYS[symbol] for symbol in layout.hf_axes[name])})"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise WeightError(f"{where}: {'; '.join(problems[:10])}{rest}.")


def _drop_tied_head(
    source: TensorSource, found: dict[str, tuple[int, ...]], layout: ModelLayout, where: object
) -> None:
    """Accept a tied head that a writer stored as well, if it equals the embedding."""
    (head,), (embedding,) = layout.family.head.hf, layout.family.embedding.hf
    if head not in found or embedding not in found:
        return
    rows = found.pop(head)[0]
    same = found[embedding][0] == rows and torch.equal(
        source.read(head, 0, 0, rows), source.read(embedding, 0, 0, rows)
    )
    if not same:
        raise WeightError(f"{where}: tie_word_embeddings is true, but {head} != {embedding}.")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{path} is not a readable safetensors file: {error}") from error


def import_weights(
    folder: Path | str,
    params: Mapping[str, torch.Tensor],
    layout: ModelLayout,
    position: ShardPosition,
) -> None:
    """Fill this rank's parameters in place from a Hugging Face folder.

    Reads only this rank's slices. Memory beyond `params` is about one slice.

    Args:
        folder: Hugging Face folder.
        params: Megatron-named parameters of this rank, with global layer numbers.
        layout: Layout of the model that `params` belong to.
        position: Position of this rank in the model.
    """
    source = SafetensorsFolder(folder)
    check_tensors(source, layout, folder)
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)


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
    """Copy a shard's runs out of `source` into `param` and zero the padding."""
    filled = 0
    for offset, run in shard.placed_runs():
        piece = source.read(run.tensor, shard.axis, run.start, run.stop)
        param.narrow(shard.axis, offset, run.size).copy_(piece)
        filled = offset + run.size
    if filled < shard.length:
        param.narrow(shard.axis, filled, shard.length - filled).zero_()


@torch.no_grad()
def collect_runs(full: Mapping[str, torch.Tensor], shard: Shard, local: torch.Tensor) -> None:
    """Copy a shard's runs out of `local` into their full tensors."""
    for offset, run in shard.placed_runs():
        target = full[run.tensor].narrow(shard.axis, run.start, run.size)
        target.copy_(local.narrow(shard.axis, offset, run.size))
