"""megatron-core itself reads converted folders at any split, and its own folders are converted."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_models import DEEP, FAMILY_NAMES, make_model
from tests.support.runs.commands import convert
from tests.support.trainer.probes import build, save_at
from tests.support.trainer.ranks import layout

EXPERTS = {"one": 1, "tp2-sp": 2, "pp2-last1": 1, "vpp2": 1, "tp2-pp2-sp": 2, "tp2-dp2-sp": 4}
"""Splits, and the ranks over which they spread experts."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Hugging Face folder and converted folder of each family."""
    folders = {}
    for family in FAMILY_NAMES:
        folder = tmp_path_factory.mktemp(family)
        changes = {"sliding_window": None} if family == "Mistral" else {}
        make_model(folder / "hf", family, sizes=DEEP, **changes)
        convert("hf-to-megatron", folder / "hf", folder / "megatron")
        folders[family] = folder / "hf", folder / "megatron"
    return folders


def _tensors(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            yield entry


def _sharded_state(rank: Any, *, per_layer: bool = False) -> dict[str, Any]:
    """Return megatron-core's sharded state of all chunks, with names as on GPUs."""
    metadata = {"non_homogeneous_layers": per_layer}
    state = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(rank.chunks)
    }
    if rank.layout.shape.num_experts:
        # the layer spec without Transformer Engine has the name of a dense layer's norm
        for entry in _tensors(state):
            entry.key = entry.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return state


def _load_and_save(rendezvous, settings, source, destination, per_layer):
    import torch
    from megatron.core import dist_checkpointing

    rank = build(rendezvous, settings)
    state = _sharded_state(rank)
    names = {entry.key for entry in _tensors(state)}
    loaded = dist_checkpointing.load(state, str(source))
    for number, chunk in enumerate(rank.chunks):
        chunk.module.load_state_dict(loaded[f"model{number}"])
    if torch.distributed.get_rank() == 0:
        destination.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded_state(rank, per_layer=per_layer), str(destination))
    return names


# families differ in their tensors, not in how a split cuts them: tests/unit/weights/layout
ALWAYS = {("Qwen3Moe", "tp2-pp2-sp")}
SLOW = {
    *((family, "tp2-pp2-sp") for family in FAMILY_NAMES),
    *(("Qwen2", split) for split in EXPERTS),
    *(("Qwen3Moe", split) for split in ("tp2-sp", "pp2-last1", "tp2-dp2-sp")),
} - ALWAYS
FURTHER = {*itertools.product(FAMILY_NAMES, EXPERTS)} - ALWAYS - SLOW


@pytest.mark.parametrize(
    ("family", "split"),
    [
        *sorted(ALWAYS),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in sorted(SLOW)),
        *(pytest.param(*one, marks=pytest.mark.full) for one in sorted(FURTHER)),
    ],
)
def test_megatron_core_loads_and_saves_the_model(ranks, families, tmp_path, family, split):
    from megadapo.weights.disk.torch_checkpoint import StoredTensors

    source, megatron = families[family]
    how = layout(split) | {"expert": EXPERTS[split] if family == "Qwen3Moe" else 1}
    saved = tmp_path / "saved"
    # a folder with one tensor of each layer is megatron-core's other form
    names = ranks.on(
        source, _load_and_save, megatron, saved, split == "tp2-pp2-sp", init="random", **how
    )
    assert set().union(*names) == StoredTensors(megatron).tensors.keys()
    convert("megatron-to-hf", saved, tmp_path / "hf", "--model", source)
    convert("verify", source, tmp_path / "hf")


def _save(rendezvous, settings, folder):
    save_at(build(rendezvous, settings), folder)


def test_megatron_core_loads_a_checkpoint_of_the_trainer(ranks, families, tmp_path):
    source, _ = families["Qwen3"]
    ranks.on(source, _save, tmp_path / "trainer", tensor=2, pipeline=2)
    how = {"init": "random", "pipeline": 2, "virtual": 2}
    ranks.on(source, _load_and_save, tmp_path / "trainer", tmp_path / "saved", False, **how)
    convert("verify", source, tmp_path / "saved", "--model", source)
