"""Conversions between Hugging Face and Megatron folders, and FP8, through the command."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadapo.errors import CheckpointError, ConfigError, WeightError
from tests.support.models.tiny_models import FAMILY_NAMES, TEXT, copy_model, make_model
from tests.support.runs.commands import convert
from tests.support.runs.exported_runs import write_run


def all_tensors(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_round_trip_is_bitwise(model_folders, tmp_path, family):
    source = model_folders[family]
    convert("hf-to-megatron", source, tmp_path / "megatron")
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    before, after = all_tensors(source), all_tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    convert("verify", source, tmp_path / "megatron")


def test_bfloat16_stays_bfloat16_and_files_are_bounded(tmp_path):
    source = make_model(tmp_path / "source", "Qwen2")
    tensors = {
        name: one.bfloat16() for name, one in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors")
    convert("hf-to-megatron", source, tmp_path / "megatron")
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


def test_damaged_folders_are_named(model_folders, tmp_path):
    source, megatron = model_folders["Qwen2"], tmp_path / "megatron"
    convert("hf-to-megatron", source, megatron)
    with pytest.raises(WeightError, match="exists already"):
        convert("hf-to-megatron", source, megatron)
    with pytest.raises(WeightError, match="no .safetensors file; write its Hugging Face folder"):
        convert("hf-to-megatron", megatron, tmp_path / "again")
    shard = megatron / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="megatron cannot be read"):
        convert("megatron-to-hf", megatron, tmp_path / "hf")
    (megatron / ".metadata").write_bytes(b"cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="which was not run"):
        convert("inspect", megatron)
    assert not (tmp_path / "hf").exists()


def test_verify_finds_one_bit_in_a_shard_file(model_folders, tmp_path):
    source, changed = model_folders["Qwen3Moe"], tmp_path / "changed"
    changed.mkdir()
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    copy_model(source, changed, lambda tensors: tensors[name][3, 3].mul_(1 + 2**-20))
    convert("hf-to-megatron", changed, tmp_path / "megatron")
    with pytest.raises(WeightError, match=f"1 tensors differ: {name}"):
        convert("verify", source, tmp_path / "megatron")


def test_checkpoint_of_a_run_is_converted_with_its_model(model_folders, tmp_path):
    """A checkpoint has no config.json and no tokenizer."""
    source, run = make_model(tmp_path / "model", "Qwen2", sizes=TEXT), tmp_path / "run"
    checkpoint = write_run(run, source, 1) / "checkpoints" / "step-1" / "trainer"
    convert("megatron-to-hf", checkpoint, tmp_path / "hf")
    convert("verify", source, tmp_path / "hf")
    convert("verify", source, checkpoint)
    (run / "config.json").unlink()
    with pytest.raises(ConfigError, match="trainer has no config.json, and no run's.*--model"):
        convert("inspect", checkpoint)
    convert("verify", source, checkpoint, "--model", source)
    with pytest.raises(WeightError, match="another model than config.json"):
        convert("inspect", checkpoint, "--model", model_folders["Qwen3"])


def test_folders_of_the_old_format_are_refused(model_folders, tmp_path):
    """Their shard files look like those of a Hugging Face folder with unknown names."""
    folder = copy_model(model_folders["Qwen2"], tmp_path)
    (folder / "megatron.json").write_text("{}")
    with pytest.raises(WeightError, match="old Megatron format.*Hugging Face folder that it was"):
        convert("inspect", folder)


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


def test_damaged_list_of_files_is_named(model_folders, tmp_path):
    (tmp_path / "config.json").write_text((model_folders["Qwen2"] / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))
    with pytest.raises(WeightError, match="has no weight_map"):
        convert("inspect", tmp_path)


def test_inspect_describes_folder(model_folders, capsys):
    convert("inspect", model_folders["Qwen3Moe"])
    text = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in text and "4 of 16" in text and "301" in text


def test_quantised_experts_are_refused(model_folders, tmp_path):
    source, destination = tmp_path / "megatron", tmp_path / "new" / "fp8"
    convert("hf-to-megatron", model_folders["Qwen3Moe"], source)
    with pytest.raises(WeightError, match="dense layers only"):
        convert("megatron-to-hf", source, destination, "--quantize", "fp8")
    assert not destination.exists()


@pytest.mark.slow
def test_fp8_weights_have_e4m3_precision(tmp_path):
    source = make_model(tmp_path / "source", "Qwen2", num_hidden_layers=2)
    (source / "tokenizer.json").write_text("{}")
    convert("hf-to-megatron", source, tmp_path / "megatron")
    before = set(tmp_path.iterdir())
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "fp8", "--quantize", "fp8")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "fp8"}
    exact, exported = load_file(source / "model.safetensors"), {}
    for path in (tmp_path / "fp8").glob("*.safetensors"):
        exported |= load_file(path)
    quantised = {name for name, one in exported.items() if one.dtype == torch.float8_e4m3fn}
    assert quantised == {name for name in exact if name.endswith("_proj.weight")}
    for name, weight in exact.items():
        if name not in quantised:
            assert torch.equal(exported[name], weight), name
            continue
        scale = exported[name + "_scale"][:, None]
        error = (exported[name].float() * scale - weight).abs()
        # Half a unit in the last of 3 mantissa bits; below 2^-6 the spacing is a constant 2^-9.
        assert (error <= torch.maximum(weight.abs() / 16, scale * 2**-10) * 1.001).all(), name
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert (tmp_path / "fp8" / "tokenizer.json").is_file()
