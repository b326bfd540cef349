"""The smallest layouts that can be split; no file is read and no tensor is made."""

from megadapo.weights.layout.layout import ModelLayout, layout_for

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 70,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 6,
    "num_experts": 4,
}


def layout_of(family: str = "Qwen2", **changes: object) -> ModelLayout:
    """Return the layout of one layer of a family, with changed sizes."""
    return layout_for(SIZES | {"architectures": [f"{family}ForCausalLM"]} | changes)
