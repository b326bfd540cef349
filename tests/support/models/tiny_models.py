"""Tiny random models of every family as Hugging Face folders; the seed decides their weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

FAMILY_NAMES = ("Qwen2", "Qwen3", "Llama", "Mistral", "Qwen3Moe")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzA:;+-*=?., \n"
SPECIAL_TOKENS = ("<pad>", "<eos>")
MAX_POSITIONS = 512

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
"""Sizes that do not divide: 2 KV heads under TP 4, 5 layers over 2 and 4 stages, 301 rows of
vocabulary, and q heads that do not add up to the hidden size."""
TEXT = {
    "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
"""Sizes with a small vocabulary: a random model ends a response after about 40 tokens, so that
a test has both finish reasons."""
ENGINE = TEXT | {
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
"""Sizes for vLLM on a CPU: its smallest head size, and heads for four ranks."""
TRAINED = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
DEEP = TRAINED | {"num_hidden_layers": 4, "initializer_range": 0.1}
"""Sizes with layers for two stages of two chunks, or for stages of unequal size."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(
    folder: Path,
    family: str,
    *,
    sizes: Mapping[str, object] = ODD,
    std: float | None = 0.05,
    vector_noise: float = 0.0,
    seed: int | None = 0,
    tokenizer: bool = False,
    **changes: object,
) -> Path:
    """Write a random model of a family into `folder` and return it.

    Args:
        sizes: Fields of its configuration; `changes` replace some of them.
        std: Deviation of every weight, vectors included, so that a lost bias or norm is visible;
            None keeps the family's own initialisation.
        vector_noise: Deviation of what is added to biases and norms.
        seed: None continues torch's current random state.
        tokenizer: Write the character tokenizer too; its vocabulary is that of `TEXT`.
    """
    import torch
    import transformers

    fields = {**sizes, **changes, "dtype": torch.float32}
    if family == "Qwen3Moe":
        fields |= EXPERTS
    if family == "Qwen2" and "head_dim" in fields:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    config = getattr(transformers, f"{family}Config")(**fields)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for param in model.parameters():
            if std is not None:
                torch.nn.init.normal_(param, std=std)
            if vector_noise and param.dim() == 1:
                param.data.add_(torch.randn_like(param) * vector_noise)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def make_text_model(folder: Path) -> Path:
    """Write a Qwen2 with a character tokenizer."""
    return make_model(folder, "Qwen2", sizes=TEXT, std=None, tokenizer=True)


def make_engine_model(folder: Path, *, seed: int, family: str = "Qwen2", **changes: object) -> Path:
    """Write a model for engines; two seeds differ only in weights."""
    return make_model(folder, family, sizes=ENGINE, std=0.15, seed=seed, tokenizer=True, **changes)


def make_trained_models(folder: Path) -> None:
    """Write one folder per architecture and option that the trainer supports."""
    import torch

    models = {
        "qwen2-tied": ("Qwen2", TRAINED, {"tie_word_embeddings": True}),
        "qwen2-untied": ("Qwen2", TRAINED, {"tie_word_embeddings": False}),
        "qwen3": ("Qwen3", TRAINED, {"head_dim": 16, "tie_word_embeddings": True}),
        "llama3": ("Llama", TRAINED, {"rope_parameters": LLAMA3_ROPE}),
        "mistral": ("Mistral", TRAINED, {"sliding_window": None}),
        "deep-tied": ("Qwen2", DEEP, {"tie_word_embeddings": True}),
        "deep-untied": ("Qwen2", DEEP, {"tie_word_embeddings": False}),
        "qwen3-moe": ("Qwen3Moe", DEEP, {"head_dim": 16, "norm_topk_prob": True}),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, (family, sizes, changes) in models.items():
            make_model(
                folder / name, family, sizes=sizes, std=None, vector_noise=0.2, seed=None, **changes
            )


def copy_model(
    source: Path, folder: Path, change: Callable[..., object] = dict, **changes: object
) -> Path:
    """Copy a model; `change` alters its tensors in place, `changes` are of its configuration."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_zeros(folder: Path, hf_config: Mapping[str, object]) -> Path:
    """Write a configuration, and weights of its sizes that are zero, into a folder."""
    import torch
    from safetensors.torch import save_file

    from megadapo.models.description import describe_stored
    from megadapo.weights.layout.layout import ModelLayout

    (folder / "config.json").write_text(json.dumps(hf_config))
    model = describe_stored(hf_config)
    shapes = ModelLayout(model.family, model.shape).hf_shapes
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character, a byte-level BPE without merges.

    transformers rebuilds the pre-tokenizer from the model type, so the tokenizer of a Qwen2
    folder must be Qwen2's own kind: in its byte alphabet a space is U+0120 and a newline U+010A.
    """
    from transformers import Qwen2Tokenizer

    alphabet = CHARACTERS.replace(" ", "\u0120").replace("\n", "\u010a")
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))},
        merges=[],
        unk_token=None,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
