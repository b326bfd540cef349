"""Conversions between Hugging Face and Megatron folders, through the command."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadapo.errors import WeightError
from megadapo.weights.disk.load import import_weights
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from tests.support.models.tiny_models import FAMILY_NAMES, copy_model, make_model
from tests.support.runs.commands import convert


def all_tensors(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 4, "pp": 2}, {"pp": 2, "vpp": 2}])
def test_round_trip_is_bitwise(model_folders, tmp_path, family, sizes):
    source = model_folders[family]
    flags = [word for name, size in sizes.items() for word in (f"--{name}", size)]
    convert("hf-to-megatron", source, tmp_path / "megatron", *flags)
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    before, after = all_tensors(source), all_tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    convert("verify", source, tmp_path / "megatron")


def test_experts_are_split_and_merged(model_folders, tmp_path):
    source = model_folders["Qwen3Moe"]
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tp", 2, "--ep", 2)
    assert len(list((tmp_path / "megatron").glob("*.safetensors"))) == 4
    convert("verify", source, tmp_path / "megatron")


def test_converted_folder_loads_at_other_splits(model_folders, tmp_path):
    source = model_folders["Qwen3"]
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tp", 4, "--pp", 2)
    layout = open_layout(source)
    for position in replica_positions(layout, tp_size=2, pp_size=4):
        ours, theirs = (
            {shard.name: torch.empty(shard.shape) for shard in layout.megatron_shards(position)}
            for _ in range(2)
        )
        import_weights(source, ours, layout, position)
        import_weights(tmp_path / "megatron", theirs, layout, position)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_bfloat16_stays_bfloat16_and_files_are_bounded(tmp_path):
    source = make_model(tmp_path / "source", "Qwen2")
    tensors = {
        name: one.bfloat16() for name, one in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors")
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tp", 2)
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    after = all_tensors(tmp_path / "hf")
    assert all(torch.equal(tensors[name], after[name]) for name in tensors)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("changes,key", [
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope.rope_theta is"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}, "rope.factor"),
    ({"num_key_value_heads": 4}, "num_key_value_heads is"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is"),
    ({"attention_bias": True}, "attention_bias is"),
    ({"vocab_size": 304}, "vocab_size is"),
    ({"head_dim": 16}, "head_dim is"),
])  # fmt: skip
def test_verify_names_config_key_that_differs(model_folders, tmp_path, changes, key):
    source = model_folders["Llama"]
    with pytest.raises(WeightError, match=key):
        convert("verify", source, copy_model(source, tmp_path, **changes))


def test_old_and_new_rope_keys_are_equal(model_folders, tmp_path):
    source = model_folders["Llama"]
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert convert("verify", source, tmp_path) == 0


def test_verify_names_the_tensor_that_differs(model_folders, tmp_path):
    source = model_folders["Mistral"]
    name = "model.layers.2.mlp.up_proj.weight"
    copy_model(source, tmp_path, lambda tensors: tensors[name][3, 3].mul_(1 + 2**-20))
    with pytest.raises(WeightError, match=f"1 tensors differ: {name}"):
        convert("verify", source, tmp_path)


def test_damaged_folders_and_bad_requests_are_named(model_folders, tmp_path):
    source = model_folders["Qwen2"]
    with pytest.raises(WeightError, match="cannot be cut into 3 equal parts"):
        convert("hf-to-megatron", source, tmp_path / "three", "--tp", 3)
    with pytest.raises(WeightError, match="TP must be at least 1"):
        convert("hf-to-megatron", source, tmp_path / "three", "--tp", 0)
    assert not (tmp_path / "three").exists()
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tp", 2)
    with pytest.raises(WeightError, match="exists already"):
        convert("hf-to-megatron", source, tmp_path / "megatron")
    path = tmp_path / "megatron" / "tp001-pp000-ep000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match="tp001-pp000-ep000.safetensors is not a readable"):
        convert("inspect", tmp_path / "megatron")
    path.unlink()
    with pytest.raises(WeightError, match="tp001-pp000-ep000.safetensors"):
        convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")


@pytest.mark.parametrize("changes,message", [
    ({"num_key_value_heads": 4}, r"k_proj.weight has shape .*\(num_key_value_heads x head_dim"),
    ({"vocab_size": 304}, r"embed_tokens.weight has shape .*\(vocab_size, hidden_size\)"),
    ({"intermediate_size": 64}, r"gate_proj.weight has shape .*\(intermediate_size, hidden_size\)"),
    ({"tie_word_embeddings": True}, r"tie_word_embeddings is true, but lm_head.weight != "),
    ({"attention_bias": True}, r"q_proj.bias is missing"),
])  # fmt: skip
def test_config_that_does_not_match_weights_is_refused(model_folders, tmp_path, changes, message):
    copy_model(model_folders["Llama"], tmp_path, **changes)
    with pytest.raises(WeightError, match=message):
        convert("hf-to-megatron", tmp_path, tmp_path / "megatron")


def test_index_cannot_leave_its_folder(model_folders, tmp_path):
    source = model_folders["Qwen2"]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match="not a file beside it"):
        convert("inspect", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors.index.json", {"weight_map": []}, "has no weight_map"),
        ("megatron.json", {"format": "megadapo-megatron-shards-1"}, "does not list the files"),
    ],
)
def test_damaged_list_of_files_is_named(model_folders, tmp_path, file, content, message):
    (tmp_path / "config.json").write_text((model_folders["Qwen2"] / "config.json").read_text())
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(WeightError, match=message):
        convert("inspect", tmp_path)


def test_inspect_describes_folder(model_folders, capsys):
    convert("inspect", model_folders["Qwen3Moe"])
    text = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in text and "4 of 16" in text and "301" in text
