"""Imports of models at every split, and models that do not fit their layout."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megadapo.errors import WeightError
from megadapo.weights.disk.sources import collect_spans, match_params, open_layout
from megadapo.weights.layout.layout import layout_for, padded_vocab_size
from megadapo.weights.layout.placement import joined_chunks, replica_positions, stage_chunks
from tests.support.models.tiny_models import FAMILY_NAMES, copy_model, make_model
from tests.support.weights.connection import rank_params
from tests.support.weights.ranks import import_weights


def imported_ranks(folder, layout, **sizes):
    positions = replica_positions(layout, **sizes)
    return [(position, rank_params(folder, layout, position)) for position in positions]


def test_vocabulary_is_padded_with_zeros(model_folders):
    folder = model_folders["Qwen3"]
    layout = open_layout(folder)
    hf = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    expected = torch.zeros(320, hf.shape[1])
    expected[:301] = hf
    ranks = imported_ranks(folder, layout, tp_size=2)
    actual = torch.cat([params["embedding.word_embeddings.weight"] for _, params in ranks])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("tp_size,pp_size,vpp_size", [
    (1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1),
    (1, 2, 2), (2, 2, 2), (4, 4, 1), (4, 1, 4),
])  # fmt: skip
def test_ranks_of_every_split_give_the_model_bitwise(
    model_folders, family, tp_size, pp_size, vpp_size
):
    folder = model_folders[family]
    layout = open_layout(folder)
    chunks = stage_chunks(layout.shape.num_layers, pp_size=pp_size, vpp_size=vpp_size)
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "stages": joined_chunks(chunks)}
    assert_gives_model(folder, layout, imported_ranks(folder, layout, **sizes))


def assert_gives_model(folder, layout, ranks):
    """Copy the shards of all ranks into full tensors and compare these with the files."""
    hf = load_file(folder / "model.safetensors")
    full = {name: torch.full(shape, torch.nan) for name, shape in layout.hf_shapes.items()}
    for position, params in ranks:
        for shard, param in match_params(params, layout, position):
            assert not param.isnan().any(), shard.name
            collect_spans(full, shard, param)
    assert full.keys() == hf.keys()
    assert all(torch.equal(full[name], hf[name]) for name in hf)


@pytest.mark.parametrize("etp_size,ep_size,num_dp", [(1, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_experts_are_spread_over_expert_ranks(model_folders, etp_size, ep_size, num_dp):
    folder = model_folders["Qwen3Moe"]
    layout = open_layout(folder)
    sizes = {"tp_size": 2, "ep_size": ep_size, "etp_size": etp_size, "num_dp": num_dp}
    ranks = imported_ranks(folder, layout, **sizes)
    for _, params in ranks:
        experts = {name.split(".experts.")[1] for name in params if ".experts." in name}
        assert len(experts) == 2 * 4 // ep_size
    assert_gives_model(folder, layout, ranks)


def test_fused_norm_names_are_known(model_folders):
    folder = model_folders["Qwen2"]
    layout = open_layout(folder)
    ((position, params),) = imported_ranks(folder, layout)
    fused = params.pop("decoder.layers.0.input_layernorm.weight").zero_()
    params["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = fused
    import_weights(folder, params, layout, position)
    hf = load_file(folder / "model.safetensors")
    assert torch.equal(fused, hf["model.layers.0.input_layernorm.weight"])


@pytest.mark.parametrize("change,message", [
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), "layers.9.x of .* is not in"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight .* shape \[3\]"),
])  # fmt: skip
def test_mismatched_checkpoint_is_rejected_by_name(model_folders, tmp_path, change, message):
    folder = copy_model(model_folders["Qwen2"], tmp_path, change)
    with pytest.raises(WeightError, match=message):
        imported_ranks(folder, open_layout(folder))


def test_mismatched_model_is_rejected_by_name(model_folders):
    folder = model_folders["Qwen2"]
    layout = open_layout(folder)
    ((position, params),) = imported_ranks(folder, layout)
    params["decoder.layers.0.adapter.weight"] = torch.zeros(2)
    with pytest.raises(WeightError, match="adapter.weight of the model is not in the layout"):
        import_weights(folder, params, layout, position)


def test_stored_tied_head_must_equal_embedding(tmp_path):
    folder = make_model(tmp_path / "tied", "Qwen2", tie_word_embeddings=True)
    same = copy_model(folder, tmp_path, lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"].clone()}
    ))  # fmt: skip
    layout = open_layout(same)
    imported_ranks(same, layout)
    other = copy_model(folder, tmp_path, lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"] + 1}
    ))  # fmt: skip
    with pytest.raises(WeightError, match="lm_head.weight != model.embed_tokens.weight"):
        imported_ranks(other, layout)


def test_unsupported_configs_are_rejected_by_name(model_folders):
    config = json.loads((model_folders["Qwen3Moe"] / "config.json").read_text())
    with pytest.raises(WeightError, match="GPT2LMHeadModel"):
        layout_for(config | {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(WeightError, match="mlp_only_layers"):
        layout_for(config | {"mlp_only_layers": [0]})
    with pytest.raises(WeightError, match="hidden_size"):
        layout_for(config | {"hidden_size": "32"})


@pytest.mark.parametrize("tp_size, rows", [(1, 320), (3, 384), (5, 320), (128, 384)])
def test_trainer_vocabulary_padding(tp_size, rows):
    assert padded_vocab_size(301, tp_size) == rows


def test_expert_parallelism_cuts_only_experts(model_folders):
    """Dense rows cut by the expert split would be whole instead of halved."""
    layout = open_layout(model_folders["Qwen3Moe"])
    split = replica_positions(layout, tp_size=2, num_dp=1, ep_size=2, etp_size=1)[1]
    dense = replica_positions(layout, tp_size=2)[1]
    expected = {s.name: s.shape for s in layout.megatron_shards(dense) if "experts" not in s.name}
    found = {s.name: s.shape for s in layout.megatron_shards(split) if "experts" not in s.name}
    assert found == expected
