"""A checkpoint has the ranks' weights: numbers of layers and experts, heads, padding, ties."""

import pytest
import torch
from safetensors.torch import load_file

from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint
from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.sources import open_layout
from tests.support.models.tiny_models import TRAINED, make_model
from tests.support.processes.forked import run_processes
from tests.support.processes.peak_memory import peak_growth
from tests.support.runs.commands import convert
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import build, export, save_at, update
from tests.support.trainer.ranks import layout


def _train_save_and_export(rendezvous, settings, batch, folder):
    rank = build(rendezvous, settings)
    update(rank, batch, policy_version=0, step=1)
    save_at(rank, folder / "trainer")
    export(rank, folder / "gathered")


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param("qwen2-tied", "one", marks=pytest.mark.full),
        ("qwen2-tied", "tp2-pp2-sp"),
        ("qwen3", "tp2-pp2-sp"),
        ("llama3", "tp2-cp2"),
        ("deep-untied", "vpp2-dp2-overlap"),
        pytest.param("deep-tied", "vpp2-dp2-overlap", marks=pytest.mark.full),
        ("deep-untied", "pp2-last1"),
        ("qwen2-untied", "tp2-pp2-sp-bf16"),
        ("qwen3-moe", "tp2-sp-dp2-ep4"),
        ("qwen3-moe", "pp2-dp2-ep2"),
    ],
)
def test_checkpoint_of_any_split_has_the_ranks_weights(ranks, models, tmp_path, model, split):
    ranks.on(model, _train_save_and_export, random_batch(RAGGED), tmp_path, **layout(split))
    gathered = load_file(tmp_path / "gathered" / "model.safetensors")
    before = load_file(models / model / "model.safetensors")
    checkpoint = TrainerCheckpoint(tmp_path / "trainer", open_layout(models / model))
    read = dict(checkpoint.tensors())
    assert checkpoint.dtype == (torch.bfloat16 if "bf16" in split else torch.float32)
    assert read.keys() == gathered.keys()
    for name, tensor in read.items():
        bits = [one.contiguous().view(torch.uint8) for one in (tensor, gathered[name])]
        assert torch.equal(*bits), name
        assert not torch.equal(tensor.float(), before[name]), f"{name} was not trained"
    convert("verify", tmp_path / "gathered", tmp_path / "trainer", "--model", models / model)


def _save(rendezvous, settings, folder):
    save_at(build(rendezvous, settings), folder)


@pytest.mark.full
def test_memory_is_bounded_by_a_file(ranks, tmp_path):
    """Stacked layers invite to read all of a kind at once, and moments are twice the model."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = make_model(tmp_path / "model", "Qwen2", sizes=TRAINED, std=None, **sizes)
    ranks.on(model, _save, tmp_path / "trainer", tensor=2, pipeline=2)
    folders = (tmp_path / "trainer", model, tmp_path / "out")
    run_processes(_export_and_measure, folders, 1, fresh=True)


def _export_and_measure(rank, checkpoint, model, destination):
    names = open_layout(model)

    def write() -> None:
        weights = TrainerCheckpoint(checkpoint, names)
        how = {"dtype": weights.dtype, "base_folder": model}
        export_weights(weights.tensors(), destination, max_file_bytes=8 << 20, **how)

    taken = peak_growth(write)
    sizes = [path.stat().st_size for path in destination.glob("*.safetensors")]
    assert sum(sizes) > 120 << 20 and len(sizes) > 10
    # the stacked gates and ups alone, read at once and taken apart, would be more than all of it
    assert taken < sum(sizes) / 2
