"""FP8 export: quantised tensors, precision, and the configuration for vLLM."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megadapo.errors import WeightError
from tests.support.models.tiny_models import make_model
from tests.support.runs.commands import convert


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
