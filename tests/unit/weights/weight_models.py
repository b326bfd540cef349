"""Small random models of every family, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch

FAMILY_NAMES = ("Qwen2", "Qwen3", "Llama", "Mistral", "Qwen3Moe")

ODD = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "vocab_size": 301,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
"""Odd on purpose: 2 KV heads under TP 4, 5 layers over 2 and 4 stages, 301 rows of vocabulary,
and q heads that do not add up to the hidden size."""


def make_model(
    folder: Path, family: str, *, std: float = 0.05, seed: int = 0, **changes: object
) -> Path:
    """A random model of a family in Hugging Face format; its layers are all different."""
    import transformers

    sizes = ODD | changes
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if family == "Qwen2":
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=std)
    model.save_pretrained(folder)
    return folder
