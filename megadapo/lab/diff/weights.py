"""The first tensor in which two checkpoints of one step differ.

Checkpoints name a tensor of a layer once, stacked over all layers, so any two splits compare, and
no rank is needed. One layer's tensor of each run is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megadapo.lab.diff.difference import Difference, Phase, row, share
from megadapo.models.families import FAMILIES
from megadapo.run.state.checkpoint import Checkpoint, load
from megadapo.trainer.types import CRITIC_FOLDER
from megadapo.weights.disk.headers import METADATA_FILE
from megadapo.weights.disk.torch_checkpoint import Box, StoredTensors

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

    checkpoint: StoredTensors
    stored: str
    layer: int | None

    @property
    def name(self) -> str:
        return (
            self.stored
            if self.layer is None
            else self.stored.replace(_LAYERS, f"{_LAYERS}{self.layer}.", 1)
        )

    @property
    def metadata(self) -> TensorStorageMetadata:
        return self.checkpoint.tensors[self.stored]

    def read(self) -> Tensor:
        sizes = list(self.metadata.size)
        start = [0] * len(sizes)
        if self.layer is not None:
            start[0], sizes[0] = self.layer, 1
        target = torch.empty(sizes, dtype=self.metadata.properties.dtype)
        self.checkpoint.read([Box(self.stored, tuple(start), target)])
        return target if self.layer is None else target[0]


def _tensors(checkpoint: StoredTensors, *, optimizer: bool) -> dict[str, _CheckpointTensor]:
    """Return the tensors by name in the order of the model: weights, or the optimizer's."""
    found = []
    for name, stored in checkpoint.tensors.items():
        if name.startswith(_OPTIMIZER) == optimizer:
            layers = range(stored.size[0]) if _LAYERS in name else [None]
            found += [_CheckpointTensor(checkpoint, name, layer) for layer in layers]
    return {tensor.name: tensor for tensor in sorted(found, key=_order)}


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
        a, b = (_stored(checkpoint, critic=critic) for checkpoint in (one, two))
        if a is None or b is None:
            continue
        before = [None if path is None else _stored(load(path), critic=critic) for path in previous]
        for phase in ("weights", "optimizer"):
            found = _compare(step, phase, a, b, before)
            if found is not None:
                yield found.with_evidence("The tensor is the critic's." if critic else "")


def _stored(checkpoint: Checkpoint, *, critic: bool) -> StoredTensors | None:
    folder = checkpoint.trainer_folder
    folder = folder / CRITIC_FOLDER if critic else folder
    return StoredTensors(folder) if (folder / METADATA_FILE).is_file() else None


def _compare(
    step: int,
    phase: Phase,
    a: StoredTensors,
    b: StoredTensors,
    before: Sequence[StoredTensors | None],
) -> Difference | None:
    of_a, of_b = (_tensors(one, optimizer=phase == "optimizer") for one in (a, b))
    unknown = sorted(of_a.keys() ^ of_b.keys())
    if unknown:
        rows = (row("tensors", len(of_a), len(of_b)),)
        text = f"Only one run has {', '.join(unknown[:5])}."
        return Difference(
            step=step, phase=phase, field="names of tensors", rows=rows, evidence=(text,)
        )
    found = [
        (name, one)
        for name, tensor in of_a.items()
        if (one := _compare_tensor(step, phase, tensor, of_b[name])) is not None
    ]
    if not found:
        return None
    name, difference = found[0]
    evidence = [share(len(found), len(of_a), "tensor", "in all")]
    if phase == "weights":
        evidence += _about_change((of_a[name], of_b[name]), before)
    return difference.with_evidence(*evidence)


def _compare_tensor(
    step: int, phase: Phase, a: _CheckpointTensor, b: _CheckpointTensor
) -> Difference | None:
    for field, values in (
        ("shape", [list(one.metadata.size) for one in (a, b)]),
        ("type", [str(one.metadata.properties.dtype) for one in (a, b)]),
    ):
        if values[0] != values[1]:
            rows = (row(field, *values),)
            return Difference(step=step, phase=phase, field=field, tensor=a.name, rows=rows)
    one, two = a.read(), b.read()
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
        step=step, phase=phase, field="elements", tensor=a.name, rows=rows, evidence=(text,)
    )


def _bits(values: Tensor) -> Tensor:
    """Return the bytes of each element, [n, size]."""
    return values.contiguous().flatten().view(torch.uint8).view(-1, values.element_size())


def _about_change(
    pair: tuple[_CheckpointTensor, _CheckpointTensor], before: Sequence[StoredTensors | None]
) -> Iterator[str]:
    """Yield how the tensor moved in this step in each run, if both kept the step before."""
    changes = [
        (now.read().double() - replace(now, checkpoint=old).read().double()).flatten()
        for now, old in zip(pair, before, strict=True)
        if old is not None
    ]
    if len(changes) < len(pair):
        return
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


def _order(tensor: _CheckpointTensor) -> tuple[int, int, int, str]:
    """Return the place in the model: embedding, layers, final norm, head."""
    state = _STATE.fullmatch(tensor.stored)
    name = tensor.stored if state is None else state[2]
    if tensor.layer is None:
        is_first = name == _FAMILY.embedding.megatron
        return (0 if is_first else 2, 0, 0, tensor.stored)
    row_name = name.removeprefix(_LAYERS)
    return 1, tensor.layer, _ROWS.get(row_name, len(_ROWS)), tensor.stored


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
