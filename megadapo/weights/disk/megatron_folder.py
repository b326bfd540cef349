"""A folder of converted shards: one safetensors file per trainer rank, and what they add up to.

Reading goes through the layout, so a folder converted for one set of parallel sizes can be loaded
at any other.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megadapo.errors import WeightError
from megadapo.weights.disk.sources import SafetensorsFolder, TensorSource, read_json
from megadapo.weights.layout.cuts import Run
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.layout.shards import Shard, ShardPosition

MANIFEST_NAME = "megatron.json"
FORMAT = "megadapo-megatron-shards-1"


class MegatronFolder:
    """Full tensors put together from the shards of a converted folder, slice by slice."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.layout = layout_for(read_json(self.folder / "config.json"))
        self.ranks = read_positions(self.folder)
        self._files = [_ShardFile(self.folder / name) for name in self.ranks]
        self._index: dict[str, list[tuple[int, Shard, int, Run]]] = {}
        for number, position in enumerate(self.ranks.values()):
            self._index_rank(number, position)

    def _index_rank(self, number: int, position: ShardPosition) -> None:
        found = dict(self._files[number].shapes)
        for shard in self.layout.megatron_shards(position):
            if found.pop(shard.name, None) != shard.shape:
                raise WeightError(
                    f"{self._files[number].path}: {shard.name} is missing or not {shard.shape}."
                )
            for offset, run in shard.placed_runs():
                self._index.setdefault(run.tensor, []).append((number, shard, offset, run))
        if found:
            raise WeightError(f"{self._files[number].path}: {min(found)} is not in the layout.")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor that the shards add up to."""
        shapes = self.layout.hf_shapes
        return {name: shape for name, shape in shapes.items() if name in self._index}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Type of every tensor."""
        first = {name: entries[0] for name, entries in self._index.items()}
        return {name: self._files[at[0]].dtypes[at[1].name] for name, at in first.items()}

    def read(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Positions `start` to `stop` along `axis` of one tensor."""
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
        """Copy `start` to `stop` along the axis that `name` is cut on; how much of it was found."""
        covered = 0
        for number, shard, offset, run in self._unique_runs(name):
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                at = offset + low - run.start
                piece = self._files[number].read(shard.name, axis, at, at + high - low)
                full.narrow(axis, low - start, high - low).copy_(piece)
                covered += high - low
        return covered

    def _unique_runs(self, name: str) -> list[tuple[int, Shard, int, Run]]:
        """One copy of each range: replicated weights and a tied head are in several files."""
        unique: dict[tuple[int, int], tuple[int, Shard, int, Run]] = {}
        for entry in self._index[name]:
            unique.setdefault((entry[3].start, entry[3].stop), entry)
        return list(unique.values())


class _ShardFile(SafetensorsFolder):
    """The shards of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path.parent)

    def _files(self) -> list[Path]:
        return [self.path]


def rank_file_name(position: ShardPosition) -> str:
    """File of a rank's shards."""
    return f"tp{position.tp_rank:03d}-pp{position.pp_rank:03d}-ep{position.ep_rank:03d}.safetensors"


def manifest_of(positions: list[ShardPosition]) -> dict[str, Any]:
    """What `megatron.json` holds: the position of every file."""
    files = {rank_file_name(position): asdict(position) for position in positions}
    return {"format": FORMAT, "files": files}


def read_positions(folder: Path) -> dict[str, ShardPosition]:
    """File name and position of every rank of a converted folder."""
    manifest = read_json(folder / MANIFEST_NAME)
    if manifest.get("format") != FORMAT:
        raise WeightError(f"{folder / MANIFEST_NAME}: format is not {FORMAT}.")
    positions = {}
    for name, fields in manifest["files"].items():
        if Path(name).name != name:
            raise WeightError(f"{folder / MANIFEST_NAME} names {name!r}, which is not a file name.")
        try:
            position = ShardPosition(**fields | {"layer_indices": tuple(fields["layer_indices"])})
        except (KeyError, TypeError) as error:
            raise WeightError(f"{folder / MANIFEST_NAME}: {name}: {error}") from error
        positions[name] = position
    return positions


def open_source(folder: Path | str) -> TensorSource:
    """The full tensors of a Hugging Face folder or of a converted one."""
    if (Path(folder) / MANIFEST_NAME).is_file():
        return MegatronFolder(folder)
    return SafetensorsFolder(folder)


def open_layout(folder: Path | str) -> ModelLayout:
    """The layout of the model whose config.json is in `folder`."""
    return layout_for(read_json(Path(folder) / "config.json"))
