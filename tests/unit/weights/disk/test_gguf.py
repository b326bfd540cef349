"""GGUF files: their weights and tokenizers as Hugging Face folders, and the tool that uses them."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megadapo.errors import ConfigError, DataError
from megadapo.weights.disk import gguf
from tests.support import REPOSITORY
from tests.support.models.tiny_models import TRAINED, make_model
from tests.support.runs.commands import convert

BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
"""Byte-level alphabet without the shifted characters."""
TOKENS = ["<|endoftext|>", *BYTES[:94], "Ġ", "Ċ", "ĊĊ"]
"""Vocabulary with one merge, of two line ends."""


def write_gguf(path: Path, model: Path, *, rule: str, quantize: bool = False) -> None:
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


def test_unknown_rule_of_a_tokenizer_is_refused(model, tmp_path):
    """With GPT-2's rule texts come back whole, as ids that the model never saw."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, rule="refact-9")
    with pytest.raises(DataError, match="'refact-9'"):
        gguf.gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
def test_truncated_file_is_named(model, tmp_path, share):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "m.gguf", model, rule="smollm")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"m\.gguf"):
        gguf.gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(1000), b"GGUF\3\0\0\0" + b"\xff" * 200])
def test_damaged_file_is_named(tmp_path, content):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(DataError, match=r"m\.gguf"):
        gguf.gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "EXTRA", ("gguf_that_is_not_installed",))
    with pytest.raises(ConfigError, match=r"megadapo\[gguf\]"):
        gguf.gguf_to_hf(tmp_path / "m.gguf", tmp_path / "hf")


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
