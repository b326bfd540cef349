"""Configurations of published models, and the bucket size of their update plans."""

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
}
QWEN_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
}
QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 94,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
}
STAGES_235B = [tuple(range(*ends)) for ends in ((0, 23), (23, 47), (47, 71), (71, 94))]
SHALLOW_235B = QWEN_235B | {"num_hidden_layers": 24}
"""A quarter of the layers, which are planned in a quarter of the time."""
SHALLOW_STAGES = [tuple(range(first, first + 6)) for first in range(0, 24, 6)]
BUCKET = 64 << 20
