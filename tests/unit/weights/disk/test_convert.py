"""Conversions between Hugging Face, Megatron and GGUF folders, and FP8, through the command."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megadapo.errors import CheckpointError, ConfigError, DataError, WeightError
from megadapo.weights.disk import conversion
from megadapo.weights.disk.conversion import gguf_to_hf
from tests.support import REPOSITORY
from tests.support.models.tiny_models import (
    FAMILY_NAMES,
    TEXT,
    TRAINED,
    copy_model,
    make_model,
    write_tokenizer,
)
from tests.support.runs.commands import convert
from tests.support.runs.exported_runs import write_run

BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
"""Byte-level alphabet without the shifted characters."""
TOKENS = ["<|endoftext|>", *BYTES[:94], "Ġ", "Ċ", "ĊĊ"]
"""Vocabulary with one merge, of two line ends."""


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


@pytest.mark.parametrize("changes,message", [
    ({"num_key_value_heads": 4}, r"k_proj.weight of .* shape .*\(num_key_value_heads x head_dim"),
    ({"vocab_size": 304}, r"embed_tokens.weight of .* shape .*\(vocab_size, hidden_size\)"),
    ({"intermediate_size": 64}, r"gate_proj.weight of .*\(intermediate_size, hidden_size\)"),
    ({"tie_word_embeddings": True}, r"tie_word_embeddings is true, but lm_head.weight != "),
])  # fmt: skip
def test_config_that_does_not_match_weights_is_refused(model_folders, tmp_path, changes, message):
    copy_model(model_folders["Llama"], tmp_path, **changes)
    with pytest.raises(WeightError, match=message):
        convert("hf-to-megatron", tmp_path, tmp_path / "megatron")


@pytest.mark.parametrize("files,message", [
    ({"model.norm.weight": "../secret.safetensors"}, "not a file beside it"),
    ([], "has no weight_map"),
])  # fmt: skip
def test_damaged_list_of_files_is_named(model_folders, tmp_path, files, message):
    (tmp_path / "config.json").write_text((model_folders["Qwen2"] / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(WeightError, match=message):
        convert("inspect", tmp_path)


def test_inspect_describes_folder(model_folders, capsys):
    convert("inspect", model_folders["Qwen3Moe"])
    text = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in text and "4 of 16" in text and "301" in text


def test_result_that_cannot_be_inspected_gets_no_name(model_folders, tmp_path, monkeypatch):
    """It stayed under its final name, where a run would read it."""

    def refuse(path):
        raise WeightError(f"{path}: tensors have different types")

    monkeypatch.setattr(conversion, "inspect", refuse)
    with pytest.raises(WeightError, match="different types"):
        conversion.hf_to_megatron(model_folders["Qwen2"], tmp_path / "made")
    assert not [*tmp_path.iterdir()]


def test_quantised_experts_are_refused(model_folders, tmp_path):
    source, destination = tmp_path / "megatron", tmp_path / "new" / "fp8"
    convert("hf-to-megatron", model_folders["Qwen3Moe"], source)
    with pytest.raises(WeightError, match="dense layers only"):
        convert("megatron-to-hf", source, destination, "--quantize", "fp8")
    assert not destination.exists()


@pytest.mark.slow
def test_fp8_weights_have_e4m3_precision(tmp_path):
    source = make_model(tmp_path / "source", "Qwen2", num_hidden_layers=2)
    write_tokenizer(source)
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


def write_gguf(
    path: Path,
    model: Path,
    *,
    rule: str = "smollm",
    quantize: bool = False,
    scaling: str | None = None,
    divisors: np.ndarray | None = None,
) -> None:
    """Write a Llama as llama.cpp does: rows of queries and keys in its order."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    if scaling is not None:
        writer.add_string("llama.rope.scaling.type", scaling)
        writer.add_rope_scaling_factor(2.0)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([*TOKENS, *(f"<{n}>" for n in range(config["vocab_size"] - len(TOKENS)))])
    writer.add_token_types([3] + [1] * (config["vocab_size"] - 1))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(0)
    names = {
        **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "mlp.up_proj": "ffn_up"},
        **{"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
        **{"mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"},
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
        **{"model.layers": "blk", "model.embed_tokens": "token_embd"},
        **{"model.norm": "output_norm", "lm_head": "output"},
    }
    for name, tensor in load_file(model / "model.safetensors").items():
        rows = tensor.numpy()
        for kind, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if kind in name:
                rows = rows.reshape(config[key], 2, -1, rows.shape[1]).swapaxes(1, 2)
                rows = rows.reshape(tensor.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        kind = GGMLQuantizationType.Q8_0 if quantize and rows.ndim == 2 else None
        data = np.ascontiguousarray(rows)
        writer.add_tensor(
            name, data if kind is None else quants.quantize(data, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TRAINED | {"intermediate_size": 64, "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp("llama")
    return make_model(folder, "Llama", sizes=sizes, vector_noise=0.1, eos_token_id=0)


@pytest.mark.parametrize("quantize", [False, True])
def test_weights_are_those_of_the_model(model, tmp_path, quantize):
    """Queries and keys in llama.cpp's order of rows have plausible shapes and wrong values."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, rule="smollm", quantize=quantize)
    convert("gguf-to-hf", tmp_path / "m.gguf", tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # 8 bits with one scale per 32 values: half a step of the largest value / 127
        bound = float(tensor.abs().max()) / 127 * 0.51 if quantize and tensor.dim() == 2 else 0.0
        assert float((tensor - after[name]).abs().max()) <= bound, name
        assert after[name].dtype == torch.float32
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    # GPT-2's rule keeps the last line end for the number, so the two are not merged
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("a\n\n12 3")) == "a\n\n12 3"


@pytest.mark.parametrize(
    ("scaling", "divisors", "said"),
    [
        (None, None, None),
        ("none", np.ones(4), None),
        ("linear", None, "linear"),
        ("yarn", None, "yarn"),
        (None, np.array([1.0, 1.0, 1.0, 8.0]), "none, rope_freqs.weight"),
    ],
)
def test_file_with_a_rotary_scaling_is_refused(model, tmp_path, scaling, divisors, said):
    """transformers drops it: each token is then read at other positions."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, scaling=scaling, divisors=divisors)
    problem = pytest.raises(DataError, match=f"rotary scaling .{said}. would be lost")
    with problem if said else nullcontext():
        gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert (tmp_path / "hf").exists() == (said is None)


def test_unknown_rule_of_a_tokenizer_is_refused(model, tmp_path):
    """With GPT-2's rule texts come back whole, as ids that the model never saw."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, rule="refact-9")
    with pytest.raises(DataError, match="'refact-9'"):
        gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
def test_truncated_file_is_named(model, tmp_path, share):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, rule="smollm")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"m\.gguf"):
        gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(1000), b"GGUF\3\0\0\0" + b"\xff" * 200])
def test_damaged_file_is_named(tmp_path, content):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(DataError, match=r"m\.gguf"):
        gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_missing_extra_is_named(tmp_path, monkeypatch):
    name = "megadapo.weights.disk.conversion.GGUF_EXTRA"
    monkeypatch.setattr(name, ("gguf_that_is_not_installed",))
    with pytest.raises(ConfigError, match=r"megadapo\[gguf\]"):
        gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")


def test_tool_keeps_to_folders_of_its_own(tmp_path, monkeypatch):
    """It replaces a damaged folder, so it must not take another's for one."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    tool = importlib.import_module("fetch_smollm2")
    assert not tool.is_complete(tmp_path / "none")
    (tmp_path / "model.safetensors").write_text("weights")
    with pytest.raises(DataError, match="SHA256SUMS"):
        tool.is_complete(tmp_path)
    digest = tool.sha256(tmp_path / "model.safetensors")
    (tmp_path / "SHA256SUMS-0-older").write_text(f"{digest}  model.safetensors\n")
    assert not tool.is_complete(tmp_path)
    (tmp_path / tool.SUMS).write_text(f"{digest}  model.safetensors\n")
    assert tool.is_complete(tmp_path)
    (tmp_path / "model.safetensors").write_text("other weights")
    assert not tool.is_complete(tmp_path)
    with pytest.raises(DataError, match="which is not used"):
        tool.check_hash(tmp_path / "model.safetensors", digest)
