"""Which models the trainer can train, and which splits their sizes allow.

Importable without torch or Megatron, so that a dry run can answer at once.
"""

from __future__ import annotations

import math

from megadapo.errors import ConfigError
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.stages import divisors, stage_problems

ROPE_KINDS = ("default", "linear", "llama3")
"""Rotary scalings that the trainer knows."""


def validate_model_layout(model: ModelDescription, trainer: TrainerConfig) -> None:
    """Refuse a model the trainer does not know, or a split that its sizes do not allow.

    The vocabulary is padded and always divides.

    Raises:
        ConfigError: names every key that does not fit and the sizes that would.
    """
    validate_architecture(model)
    split_by_tensor = {
        "num_attention_heads": model.shape.num_heads,
        "num_key_value_heads": model.shape.num_kv_heads,
        "intermediate_size": model.shape.ffn_size,
    }
    problems = [
        f"trainer.tensor_parallel = {trainer.tensor_parallel} does not divide the model's "
        f"{name} = {size}; sizes that fit this model: "
        f"{divisors(math.gcd(*split_by_tensor.values()))}"
        for name, size in split_by_tensor.items()
        if size % trainer.tensor_parallel
    ]
    problems += stage_problems(model.shape.num_layers, trainer)
    if problems:
        raise ConfigError("\n".join(problems))


def validate_critic(critic: ModelDescription, policy: ModelDescription) -> None:
    """Refuse a critic that cannot read the policy's micro-batches.

    Raises:
        ConfigError: names what differs.
    """
    if critic.shape.vocab_size != policy.shape.vocab_size:
        raise ConfigError(
            f"critic.path: vocab_size = {critic.shape.vocab_size}, but the policy's is "
            f"{policy.shape.vocab_size}: a critic reads the policy's tokens"
        )
    if (critic.rope, critic.shape.head_dim) != (policy.rope, policy.shape.head_dim):
        raise ConfigError(
            "critic.path: its rotary embedding or head_dim is not the policy's, and the two share "
            "their micro-batches"
        )
    if critic.max_positions < policy.max_positions:
        raise ConfigError(
            f"critic.path: max_position_embeddings = {critic.max_positions} is below the policy's "
            f"{policy.max_positions}"
        )


def validate_architecture(model: ModelDescription) -> None:
    """Refuse a model, or an option of one, that the trainer would compute wrongly.

    Raises:
        ConfigError: names the key of its config.json.
    """
    name = model.family.architecture
    if model.shape.num_experts:
        raise ConfigError(f"model.path: {name} has experts, which the trainer cannot train")
    if model.hidden_act != "silu":
        raise ConfigError(f"model.path: hidden_act {model.hidden_act!r} is not supported")
    for flag in ("attention_bias", "mlp_bias"):
        is_choice = model.family.has_optional(flag) and getattr(model.family, flag, None) is None
        if is_choice and getattr(model.shape, flag):
            raise ConfigError(f"model.path: {flag} is not supported for {name}")
    if model.sliding_window is not None:
        raise ConfigError("model.path: attention with a sliding_window is not supported")
    if model.rope.kind not in ROPE_KINDS:
        raise ConfigError(
            f"model.path: rotary scaling {model.rope.kind!r} is not supported; known are "
            f"{', '.join(ROPE_KINDS)}"
        )
