"""A GPU's layers, from megatron-core's spec, against a CPU's: weights, sums, packing and rotary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.commands import convert
from tests.support.trainer.fresh_ranks import Place, with_stand_ins

pytestmark = pytest.mark.slow

LENGTHS = [8, 4, 12, 20]
"""Sequences that two context-parallel ranks can share."""
TENSORS = {"tensor_parallel": 2, "sequence_parallel": True}
SPLITS = {
    "qwen2-tied": TENSORS,
    "qwen3": TENSORS,
    "llama3": {"context_parallel": 2},
    "qwen3-moe": TENSORS | {"expert_parallel": 2},
}
"""Model -> what its two ranks share."""
SAVED = "qwen3-moe"


def _compare(meet: Callable[[], Place], models: Path, saved: Path) -> dict[str, Any]:
    from tests.support.trainer.te_layers import compare

    found = {}
    for name, split in SPLITS.items():
        checkpoint = saved if name == SAVED else None
        found[name] = compare(models / name, meet(), split, LENGTHS, checkpoint)
    return found


@pytest.fixture(scope="module")
def answers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of both ranks, by model."""
    folder = tmp_path_factory.mktemp("answers")
    return with_stand_ins(_compare, folder, models, folder / "saved")


@pytest.mark.parametrize("model", SPLITS)
def test_gpu_layers_equal_cpu_layers(answers, model):
    for answer in answers:
        found = answer[model]
        assert "tests.support.trainer.te_stand_in" in found["layers"]
        assert max(found["errors"].values()) < 1e-12, found["errors"]


@pytest.mark.parametrize("model", SPLITS)
def test_gradient_marks_are_the_same(answers, model):
    for answer in answers:
        local, of_te = answer[model]["marks"]
        assert of_te == local


@pytest.mark.parametrize("model", SPLITS)
def test_converted_folder_has_the_names_of_gpu_layers(answers, models, tmp_path, model):
    """megatron-core loads nothing from a folder without the state that layers have."""
    from megadapo.weights.disk.torch_checkpoint import StoredTensors, read_metadata

    convert("hf-to-megatron", models / model, tmp_path / "megatron")
    names = {name for answer in answers for name in answer[model]["names"]}
    assert names <= read_metadata(tmp_path / "megatron").state_dict_metadata.keys()
    assert StoredTensors(tmp_path / "megatron").tensors.keys() <= names


def test_checkpoint_of_gpu_layers(answers):
    """They have a state beside their weights, and experts are one layer of many."""
    assert [answer[SAVED]["kept"] for answer in answers] == [True, True]
