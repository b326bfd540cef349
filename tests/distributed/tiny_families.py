"""Tiny random models of every family the trainer knows, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
DEEP = SIZES | {"num_hidden_layers": 4, "initializer_range": 0.1}
"""Enough layers for two stages of two chunks, or for stages of unequal size."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_models(folder: Path) -> None:
    """One folder per name; biases and norms are random too, so that a lost one shows."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    configs = {
        "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen2-untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
        "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
        "mistral": MistralConfig(**SIZES, sliding_window=None),
        "deep-tied": Qwen2Config(**DEEP, tie_word_embeddings=True),
        "deep-untied": Qwen2Config(**DEEP, tie_word_embeddings=False),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, config in configs.items():
            config.dtype = torch.float32
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(folder / name)
