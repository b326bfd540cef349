"""Keys of config.json: what each family reads, and what does not change what a model computes.

A model with any other key is refused, because transformers and vLLM may compute another function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families import Family

_READ = """
    architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps initializer_range
    tie_word_embeddings rope_theta rope_scaling rope_parameters sliding_window use_sliding_window
    layer_types
"""
_NO_EFFECT = """
    transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id attention_dropout
    hidden_dropout pretraining_tp max_window_layers name_or_path output_router_logits
    router_aux_loss_coef output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate torchscript use_bfloat16 attn_implementation id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    model_max_length is_decoder is_llama_config transformers.js_config unsloth_fixed unsloth_version
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
    target_lookbehind temperature tf_legacy_loss top_k top_p typical_p
"""
"""Notes, types, special tokens, losses, dropout and settings of generation."""
_FIXED: Mapping[str, object] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "mlp_bias": False,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
"""Keys that must have these values in every family."""


def check_keys(hf_config: Mapping[str, Any], family: Family) -> None:
    """Raise WeightError if the trainer would not compute the model that a configuration means."""
    if problems := list(_problems(hf_config, family)):
        raise WeightError("\n".join(f"config.json: {problem}" for problem in problems))


def _problems(hf_config: Mapping[str, Any], family: Family) -> Iterator[str]:
    fixed = {**_FIXED, "attention_bias": family.has_qkv_bias}
    # transformers and vLLM take a key that is null as one that is missing
    given = {key: value for key, value in hf_config.items() if value is not None}
    kind = given.get("model_type", family.model_type)
    if kind != family.model_type:
        yield f"model_type {kind!r} is not that of {family.architecture}, {family.model_type!r}"
    for key, value in fixed.items():
        if given.get(key, value) != value:
            yield f"{key} {given[key]!r} is not supported for {family.architecture}"
    uses_window = not family.window_needs_flag or hf_config.get("use_sliding_window", False)
    if uses_window and hf_config.get("sliding_window", family.default_window):
        yield "attention with a sliding_window is not supported"
    layers = given.get("layer_types")
    if layers is not None and (
        not isinstance(layers, list)
        or len(layers) != given["num_hidden_layers"]
        or any(layer != "full_attention" for layer in layers)
    ):
        yield "layer_types must be 'full_attention' for each of num_hidden_layers"
    known = {*_READ.split(), *_NO_EFFECT.split(), *fixed, *family.keys}
    # transformers' own notes begin with _
    unknown = [key for key in given if key not in known and not key.startswith("_")]
    if unknown:
        yield (
            f"{', '.join(unknown)}: not supported for {family.architecture}; delete what does not "
            "change what the model computes"
        )
