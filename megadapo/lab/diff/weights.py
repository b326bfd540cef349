"""The first tensor in which two checkpoints of one step differ.

Checkpoints name a tensor of a layer once, stacked over all layers, so any two splits compare, and
no rank is needed. One layer's tensor of each run is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.lab.diff.difference import Difference, Phase, row, share
from megadapo.models.families import FAMILIES
from megadapo.run.state.checkpoint import Checkpoint, load
from megadapo.trainer.types import CRITIC_FOLDER
from megadapo.weights.disk.headers import METADATA_FILE
from megadapo.weights.disk.torch_checkpoint import StoredTensors, Window

_OPTIMIZER = ("optimizer.", "chained_")
"""Prefixes of masters and moments."""
_STATE = re.compile(r"optimizer\.state\.(\w+?)\.(.+)")
_LAYERS = "decoder.layers."
_SAME_DIRECTION = 0.999
"""Cosine from which two changes of a tensor have one direction."""
_SAME_LENGTH = 1e-3
"""Relative difference of two changes below which neither moved farther."""


@dataclass(frozen=True)
class _CheckpointTensor:
    """A tensor of a checkpoint: a stored one, or one layer of it."""

    stored: str
    layer: int | None

    @property
    def name(self) -> str:
        return (
            self.stored
            if self.layer is None
            else self.stored.replace(_LAYERS, f"{_LAYERS}{self.layer}.", 1)
        )


class _CheckpointWeights:
    """The tensors of one folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._stored = StoredTensors(folder)

    def places(self, *, optimizer: bool) -> list[_CheckpointTensor]:
        """Return the tensors in the order of the model: weights, or the optimizer's."""
        places = []
        for name, stored in self._stored.tensors.items():
            if name.startswith(_OPTIMIZER) != optimizer:
                continue
            layers = range(stored.size[0]) if _LAYERS in name else [None]
            places += [_CheckpointTensor(name, layer) for layer in layers]
        return sorted(places, key=_order)

    def shape(self, place: _CheckpointTensor) -> tuple[int, ...]:
        return tuple(self._stored.tensors[place.stored].size)

    def dtype(self, place: _CheckpointTensor) -> torch.dtype:
        return self._stored.tensors[place.stored].properties.dtype

    def read(self, place: _CheckpointTensor) -> Tensor:
        stored = self._stored.tensors[place.stored]
        start, sizes = [0] * len(stored.size), list(stored.size)
        if place.layer is not None:
            start[0], sizes[0] = place.layer, 1
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        self._stored.read([Window(place.stored, tuple(start), target)])
        return target if place.layer is None else target[0]


def compare_checkpoints(
    step: int, paths: tuple[Path, Path], previous: tuple[Path | None, Path | None]
) -> Iterator[Difference]:
    """Yield the first difference of the weights, and of the optimizer's state.

    Args:
        paths: the step's checkpoint in A and in B.
        previous: the checkpoints of the step before, which show how far each run moved.
    """
    one, two = (load(path, hashes=False) for path in paths)
    if one.files == two.files:
        return  # the same bytes, by their SHA-256
    one, two = (load(path) for path in paths)
    for critic in (False, True):
        folders = [_folder(checkpoint, critic=critic) for checkpoint in (one, two)]
        if folders[0] is None or folders[1] is None:
            continue
        pair = _CheckpointWeights(folders[0]), _CheckpointWeights(folders[1])
        before = [None if path is None else _weights_before(path, critic) for path in previous]
        for phase in ("weights", "optimizer"):
            found = _compare(step, phase, pair, (before[0], before[1]))
            if found is not None:
                yield found.with_evidence("The tensor is the critic's." if critic else "")


def _folder(checkpoint: Checkpoint, *, critic: bool) -> Path | None:
    folder = checkpoint.trainer_folder
    folder = folder / CRITIC_FOLDER if critic else folder
    return folder if (folder / METADATA_FILE).is_file() else None


def _weights_before(path: Path, critic: bool) -> _CheckpointWeights | None:
    folder = _folder(load(path), critic=critic)
    return None if folder is None else _CheckpointWeights(folder)


def _compare(
    step: int,
    phase: Phase,
    pair: tuple[_CheckpointWeights, _CheckpointWeights],
    before: tuple[_CheckpointWeights | None, _CheckpointWeights | None],
) -> Difference | None:
    a, b = pair
    of_a, of_b = (one.places(optimizer=phase == "optimizer") for one in pair)
    unknown = sorted({place.name for place in of_a} ^ {place.name for place in of_b})
    if unknown:
        rows = [row("tensors", len(of_a), len(of_b))]
        text = f"Only one run has {', '.join(unknown[:5])}."
        return Difference(
            step=step, phase=phase, field="names of tensors", rows=tuple(rows), evidence=(text,)
        )
    first, num_differing = None, 0
    for place in of_a:
        found = _compare_tensor(step, phase, place, a, b)
        if found is not None:
            num_differing += 1
            first = first or (place, found)
    if first is None:
        return None
    place, difference = first
    evidence = [share(num_differing, len(of_a), "tensor", "in all")]
    if phase == "weights" and before[0] is not None and before[1] is not None:
        evidence += _about_change(place, pair, (before[0], before[1]))
    return difference.with_evidence(*evidence)


def _compare_tensor(
    step: int, phase: Phase, place: _CheckpointTensor, a: _CheckpointWeights, b: _CheckpointWeights
) -> Difference | None:
    for field, values in (
        ("shape", (list(a.shape(place)), list(b.shape(place)))),
        ("type", (str(a.dtype(place)), str(b.dtype(place)))),
    ):
        if values[0] != values[1]:
            rows = (row(field, *values),)
            return Difference(step=step, phase=phase, field=field, tensor=place.name, rows=rows)
    one, two = a.read(place), b.read(place)
    differs = _bits(one).ne(_bits(two)).any(1)
    if not differs.any():
        return None
    first = int(differs.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), one.shape)]
    distance = (one.double() - two.double()).abs().nan_to_num(nan=torch.inf).max().item()
    # numpy has no bf16; float64 holds it exactly
    kept = one.dtype in (torch.float32, torch.float64)
    shown = [
        v.flatten()[first].to(v.dtype if kept else torch.float64).numpy()[()] for v in (one, two)
    ]
    text = (
        f"{int(differs.sum())} of {one.numel()} elements differ, by at most {distance:.3g}; the "
        f"first is {index}."
    )
    rows = (row(f"element {index}", *shown),)
    return Difference(
        step=step,
        phase=phase,
        field="elements",
        tensor=place.name,
        rows=rows,
        evidence=(text,),
    )


def _bits(values: Tensor) -> Tensor:
    """Return the bytes of each element, [n, size]."""
    return values.contiguous().flatten().view(torch.uint8).view(-1, values.element_size())


def _about_change(
    place: _CheckpointTensor,
    pair: tuple[_CheckpointWeights, _CheckpointWeights],
    before: tuple[_CheckpointWeights, _CheckpointWeights],
) -> Iterator[str]:
    """Yield how the tensor moved in this step in each run."""
    changes = [
        (now.read(place).double() - old.read(place).double()).flatten()
        for now, old in zip(pair, before, strict=True)
    ]
    a, b = (float(change.norm()) for change in changes)
    for name, size, other in (("A", a, b), ("B", b, a)):
        if size == 0 < other:
            yield (
                f"The tensor of {name} is the one of the step before: {name} skipped the update, "
                "or lost it."
            )
            return
    is_aligned = float(changes[0] @ changes[1]) > _SAME_DIRECTION * a * b
    if a and b and is_aligned and abs(b / a - 1) > _SAME_LENGTH:
        yield f"B moved it {b / a:.4g} times as far as A, in the same direction."


def _order(place: _CheckpointTensor) -> tuple[int, int, int, str]:
    """Return the place in the model: embedding, layers, final norm, head."""
    state = _STATE.fullmatch(place.stored)
    name = place.stored if state is None else state[2]
    if place.layer is None:
        is_first = name == _FAMILY.embedding.megatron
        return (0 if is_first else 2, 0, 0, place.stored)
    row_name = name.removeprefix(_LAYERS)
    return 1, place.layer, _ROWS.get(row_name, len(_ROWS)), place.stored


def _rows() -> dict[str, int]:
    """Return the position of each weight of a layer, of all families."""
    names: dict[str, None] = {}
    for family in FAMILIES.values():
        for weight in family.layer:
            for name in filter(None, (weight.megatron, weight.megatron_alias)):
                names[name.replace(".local_experts.{e}", ".experts")] = None
    return {name: index for index, name in enumerate(names)}


_FAMILY = next(iter(FAMILIES.values()))
_ROWS = _rows()
