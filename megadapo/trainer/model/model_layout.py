"""Checks that the trainer supports a model, and that its sizes allow the split.

Importable without torch or Megatron, so that a dry run is fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megadapo.errors import ConfigError
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.placement import joined_chunks, replica_positions, stage_chunks
from megadapo.weights.layout.shards import ShardPosition


def validate_model_layout(model: ModelDescription, trainer: TrainerConfig) -> None:
    """Raise ConfigError unless the model's sizes allow the split; it names sizes that fit.

    The padded vocabulary always divides.
    """
    split_by_tensor = {
        "num_attention_heads": model.shape.num_heads,
        "num_key_value_heads": model.shape.num_kv_heads,
    }
    if not model.shape.num_experts:
        split_by_tensor["intermediate_size"] = model.shape.ffn_size
    problems = [
        f"trainer.tensor_parallel = {trainer.tensor_parallel} does not divide the model's "
        f"{name} = {size}; sizes that fit this model: "
        f"{divisors(math.gcd(*split_by_tensor.values()))}"
        for name, size in split_by_tensor.items()
        if size % trainer.tensor_parallel
    ]
    problems += stage_problems(model.shape.num_layers, trainer)
    problems += _expert_problems(model, trainer)
    if problems:
        raise ConfigError("\n".join(problems))


def _expert_problems(model: ModelDescription, trainer: TrainerConfig) -> Iterator[str]:
    shape = model.shape
    splits = {
        "expert_parallel": ("num_experts", shape.num_experts),
        "expert_tensor_parallel": ("moe_intermediate_size", shape.expert_ffn_size),
    }
    for key, (name, size) in splits.items():
        ranks = getattr(trainer, key)
        if ranks > 1 and not shape.num_experts:
            yield f"trainer.{key} = {ranks} is for models with experts, and this one has none"
        elif size % ranks:
            yield (
                f"trainer.{key} = {ranks} does not divide the model's {name} = {size}; sizes that "
                f"fit this model: {divisors(size)}"
            )
    if trainer.router_aux_loss_coef and not shape.num_experts:
        yield "trainer.router_aux_loss_coef is for models with experts, and this one has none"
    if trainer.router_replay and not shape.num_experts:
        yield "trainer.router_replay is for models with experts, and this one has none"
    if shape.num_experts and trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        # otherwise every tensor-parallel rank sends the same tokens to the experts
        yield (
            f"trainer.tensor_parallel = {trainer.tensor_parallel} of a model with experts needs "
            "trainer.sequence_parallel = true"
        )


def validate_critic(
    critic: ModelDescription, policy: ModelDescription, trainer: TrainerConfig
) -> None:
    """Raise ConfigError unless a critic can read the policy's micro-batches, and be split alike."""
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
    _validate_beside_policy(critic, trainer, key="critic.path")


def validate_teacher(
    teacher: ModelDescription, policy: ModelDescription, trainer: TrainerConfig
) -> None:
    """Raise ConfigError unless a teacher can score the policy's tokens, and be split alike."""
    key = "algorithm.reference.path"
    if teacher.shape.vocab_size < policy.shape.vocab_size:
        raise ConfigError(
            f"{key}: vocab_size = {teacher.shape.vocab_size} is below the policy's "
            f"{policy.shape.vocab_size}: a teacher scores every token of the policy"
        )
    _validate_beside_policy(teacher, trainer, key=key)


def _validate_beside_policy(model: ModelDescription, trainer: TrainerConfig, *, key: str) -> None:
    """Check another model that is split like the policy; `key`: its path in the configuration."""
    # only the policy's routers are balanced and replayed
    plain = trainer.model_copy(update={"router_aux_loss_coef": 0.0, "router_replay": False})
    try:
        validate_model_layout(model, plain)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{key}: {line}" for line in str(error).splitlines())) from None


def chunks_of_stages(num_layers: int, trainer: TrainerConfig) -> list[list[range]]:
    """Return [stage][chunk] -> layers of the whole model."""
    return stage_chunks(
        num_layers,
        pp_size=trainer.pipeline_parallel,
        vpp_size=trainer.virtual_pipeline,
        first=trainer.first_stage_layers,
        last=trainer.last_stage_layers,
    )


def rank_positions(layout: ModelLayout, trainer: TrainerConfig) -> list[ShardPosition]:
    """Return the position of every rank, in Megatron's rank order."""
    return replica_positions(
        layout,
        tp_size=trainer.tensor_parallel,
        pp_size=trainer.pipeline_parallel,
        stages=joined_chunks(chunks_of_stages(layout.shape.num_layers, trainer)),
        ep_size=trainer.expert_parallel,
        etp_size=trainer.expert_tensor_parallel,
        num_dp=trainer.num_replicas,
    )


def stage_problems(num_layers: int, trainer: TrainerConfig) -> list[str]:
    """Return why the layers cannot be split as configured; an empty list if they can."""
    sizes_given = {
        "first_stage_layers": trainer.first_stage_layers,
        "last_stage_layers": trainer.last_stage_layers,
    }
    fixed = {name: size for name, size in sizes_given.items() if size}
    num_even = trainer.pipeline_parallel - len(fixed)
    rest = num_layers - sum(fixed.values())
    keys = " and ".join(f"trainer.{name} = {size}" for name, size in fixed.items())
    if not fixed and num_layers % num_even:
        return [
            f"trainer.pipeline_parallel = {num_even} does not divide the model's "
            f"num_hidden_layers = {num_layers}; sizes that fit this model: {divisors(num_layers)} "
            "(or give the ends fewer layers: trainer.first_stage_layers, trainer.last_stage_layers)"
        ]
    if fixed and (rest < num_even or rest % max(1, num_even) or (rest and not num_even)):
        return [
            f"{keys} of num_hidden_layers = {num_layers}: {rest} layers are left for the "
            f"{num_even} other stages of trainer.pipeline_parallel = {trainer.pipeline_parallel}; "
            "each of them must get as many, and at least one"
        ]
    if not num_even and trainer.virtual_pipeline > 1:
        # megatron-core divides by the number of other stages there
        return [
            f"{keys} leave no other stage, which trainer.virtual_pipeline = "
            f"{trainer.virtual_pipeline} needs: set one of them only"
        ]
    even = [rest // num_even] if num_even else []
    sizes = dict.fromkeys([*even, *fixed.values()])
    unfit = [size for size in sizes if size % trainer.virtual_pipeline]
    return [
        f"trainer.virtual_pipeline = {trainer.virtual_pipeline} does not divide the {size} layers "
        f"of a pipeline stage (num_hidden_layers = {num_layers}); sizes that fit such a stage: "
        f"{divisors(size)}"
        for size in unfit
    ]


def divisors(number: int) -> str:
    """Return "1, 2, 4" for 4, as sizes to suggest in an error."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
