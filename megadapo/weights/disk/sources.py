"""Full tensors, read slice by slice from a Hugging Face folder or from a folder of trainer shards.

A folder of trainer shards has one safetensors file per rank, and `megatron.json` with the ranks'
positions. Reads go through the layout, so it can be loaded at any other parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megadapo.errors import WeightError
from megadapo.models.shape import CONFIG_KEYS
from megadapo.weights.layout.cuts import Run
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.layout.shards import Shard, ShardPosition

INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "megatron.json"
FORMAT = "megadapo-megatron-shards-1"

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
        index = self.folder / INDEX_NAME
        if not index.is_file():
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                raise WeightError(f"{self.folder} holds no .safetensors file.")
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


class MegatronFolder:
    """Full tensors assembled from the shards of a converted folder, slice by slice."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.layout = open_layout(self.folder)
        self.ranks = read_positions(self.folder)
        self._files = [SafetensorsFolder(self.folder / name) for name in self.ranks]
        self._index: dict[str, list[tuple[int, Shard, int, Run]]] = {}
        for number, position in enumerate(self.ranks.values()):
            self._index_rank(number, position)

    def _index_rank(self, number: int, position: ShardPosition) -> None:
        found = dict(self._files[number].shapes)
        for shard in self.layout.megatron_shards(position):
            if found.pop(shard.name, None) != shard.shape:
                raise WeightError(
                    f"{self._files[number].folder}: {shard.name} is missing or not {shard.shape}."
                )
            for offset, run in shard.placed_runs():
                self._index.setdefault(run.tensor, []).append((number, shard, offset, run))
        if found:
            raise WeightError(f"{self._files[number].folder}: {min(found)} is not in the layout.")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self.layout.hf_shapes
        return {name: shape for name, shape in shapes.items() if name in self._index}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        first = {name: entries[0] for name, entries in self._index.items()}
        return {name: self._files[at[0]].dtypes[at[1].name] for name, at in first.items()}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        if name not in self._index:
            raise WeightError(f"{self.folder} has no part of {name}.")
        shape = list(self.shapes[name])
        cut_axis = self._index[name][0][1].axis
        window = (start, stop) if axis == cut_axis else (0, shape[cut_axis])
        shape[cut_axis] = window[1] - window[0]
        full = torch.empty(shape, dtype=self.dtypes[name])
        if self._read_window(name, full, cut_axis, *window) != shape[cut_axis]:
            raise WeightError(f"{self.folder}: the shards do not cover all of {name}.")
        return full if axis == cut_axis else full.narrow(axis, start, stop - start)

    def _read_window(self, name: str, full: torch.Tensor, axis: int, start: int, stop: int) -> int:
        """Copy `start` to `stop` along the cut axis into `full`; return the length found."""
        # replicated weights and a tied head are in several files: read one copy of each range
        unique: dict[tuple[int, int], tuple[int, Shard, int, Run]] = {}
        for entry in self._index[name]:
            unique.setdefault((entry[3].start, entry[3].stop), entry)
        covered = 0
        for number, shard, offset, run in unique.values():
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                at = offset + low - run.start
                piece = self._files[number].read(shard.name, axis, at, at + high - low)
                full.narrow(axis, low - start, high - low).copy_(piece)
                covered += high - low
        return covered


def open_source(folder: Path | str) -> TensorSource:
    """Open a Hugging Face folder or a folder of trainer shards."""
    if (Path(folder) / MANIFEST_NAME).is_file():
        return MegatronFolder(folder)
    return SafetensorsFolder(folder)


def open_layout(folder: Path | str) -> ModelLayout:
    """Return the layout of the model whose config.json is in `folder`."""
    return layout_for(read_json(Path(folder) / "config.json"))


def rank_file_name(position: ShardPosition) -> str:
    """Return the file name of a rank's shards."""
    name = f"tp{position.tp_rank:03d}-pp{position.pp_rank:03d}-ep{position.ep_rank:03d}"
    rank, size = position.expert_tp
    if size not in (1, position.tp_size):
        # otherwise the three ranks determine it
        name += f"-etp{rank:03d}"
    return f"{name}.safetensors"


def manifest_of(positions: list[ShardPosition]) -> dict[str, Any]:
    """Return the content of `megatron.json`: the position of every file."""
    files = {rank_file_name(position): asdict(position) for position in positions}
    return {"format": FORMAT, "files": files}


def read_positions(folder: Path) -> dict[str, ShardPosition]:
    """Read file name -> position of every rank of a converted folder."""
    manifest = read_json(folder / MANIFEST_NAME)
    if manifest.get("format") != FORMAT:
        raise WeightError(f"{folder / MANIFEST_NAME}: format is not {FORMAT}.")
    files, positions = manifest.get("files"), {}
    if not isinstance(files, dict):
        raise WeightError(f"{folder / MANIFEST_NAME} does not list the files of the ranks.")
    for name, fields in files.items():
        if Path(name).name != name:
            raise WeightError(f"{folder / MANIFEST_NAME} names {name!r}, which is not a file name.")
        try:
            position = ShardPosition(**fields | {"layer_indices": tuple(fields["layer_indices"])})
        except (KeyError, TypeError) as error:
            raise WeightError(f"{folder / MANIFEST_NAME}: {name}: {error}") from error
        positions[name] = position
    return positions


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
