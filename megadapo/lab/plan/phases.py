"""What lies on each kind of GPU in each phase of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.config import RunConfig
from megadapo.data.routed_experts import number_type
from megadapo.lab.plan.cards import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    GRAPH_BYTES,
    MIB,
    Card,
)
from megadapo.lab.plan.engine import EngineBytes, engine_bytes
from megadapo.lab.plan.ranks import RankKind, StateBytes, rank_kinds, state_bytes
from megadapo.lab.plan.training import UpdateBytes, UpdateLoad, update_bytes
from megadapo.models.description import ModelDescription, describe_critic
from megadapo.trainer.config import OffloadConfig, TrainerConfig
from megadapo.weights.layout.layout import ModelLayout

BUCKETS_IN_FLIGHT = 2
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase on one kind of GPU: bytes by what they are for."""

    name: str
    items: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """GPUs that hold the same."""

    name: str
    num_gpus: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a run, by their configurations."""

    policy: ModelDescription
    critic: ModelDescription | None = None


def models_of(config: RunConfig) -> Models:
    """The run's models, wherever they are described; nothing is downloaded.

    Raises:
        DataError: a model is neither here nor among those that are known.
        WeightError: its configuration is of no family that is known.
    """
    from megadapo.models.description import describe_model
    from megadapo.models.folder import find_hf_config

    policy = find_hf_config(config.model.path)
    if config.algorithm.advantage != "gae":
        return Models(policy=describe_model(policy))
    path = config.critic.path
    critic = policy if path is None else find_hf_config(path, key="critic.path")
    return Models(policy=describe_model(policy), critic=describe_critic(critic))


def gpu_kinds(config: RunConfig, models: Models, card: Card) -> list[GpuKind]:
    """Every kind of GPU of the run, the trainer's stages first."""
    layout = ModelLayout(models.policy.family, models.policy.shape)
    engine = engine_bytes(models.policy, config.rollout, card, itemsize=itemsize_of(config))
    kinds = [
        _trainer_gpu(config, models, kind, engine) for kind in rank_kinds(layout, config.trainer)
    ]
    if config.cluster.placement == "separate":
        kinds.append(_engine_gpu(config, engine))
    return kinds


def update_load(config: RunConfig, trainer: TrainerConfig) -> UpdateLoad:
    """The most a rank may have to compute: every response as long as it can be."""
    longest = longest_sequence(config)
    tokens = max(trainer.tokens_per_micro_batch, longest)
    share = -(-config.algorithm.responses_per_mini_batch // trainer.data_parallel) * longest
    # a sequence is cut in two chunks for each context-parallel rank
    multiple = trainer.tensor_parallel * (
        2 * trainer.context_parallel if trainer.context_parallel > 1 else 1
    )
    responses = config.sampling.prompts_per_step * config.sampling.responses_per_prompt
    return UpdateLoad(
        tokens_per_micro_batch=-(-tokens // multiple) * multiple,
        num_micro_batches=-(-share // tokens),
        num_step_tokens=responses // trainer.data_parallel * longest,
    )


def fullest(kinds: list[GpuKind]) -> str:
    """The phase that takes most of a GPU, in words."""
    phase, kind = max(
        ((phase, kind) for kind in kinds for phase in kind.phases), key=lambda pair: pair[0].total
    )
    return f"{kind.name} is fullest in {phase.name}, with {phase.total / GIB:.1f} GiB"


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with its longest response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def itemsize_of(config: RunConfig) -> int:
    """Bytes of an element of weights and activations."""
    return 4 if config.model.dtype == "float32" else 2


def _trainer_gpu(config: RunConfig, models: Models, kind: RankKind, engine: EngineBytes) -> GpuKind:
    trainer, is_shared = config.trainer, config.cluster.placement == "colocated"
    state = _state(config, models, kind)
    update = update_bytes(
        models.policy,
        trainer,
        kind,
        update_load(config, trainer),
        itemsize=itemsize_of(config),
        fused=True,
    )
    asleep = {"engine, asleep": sleeping_bytes(config)} if is_shared else {}
    awake = {"engine weights": engine.weights} if is_shared else {}
    held = _held(state, trainer) | _buckets(config, BUCKETS_IN_FLIGHT)
    offload = trainer.offload if is_shared else OffloadConfig()
    idle = _without(held, offload, "gradients", "optimizer")
    phases = [
        Phase(name="start", items=_start(state, trainer) | asleep),
        Phase(name="train", items=held | asleep | _update(update)),
        Phase(name="sync", items=idle | asleep | awake),
        Phase(name="save", items=_without(held, offload, "gradients") | asleep),
    ]
    if is_shared:
        generating = _without(idle, offload, "parameters")
        phases.insert(1, Phase(name="rollout", items=generating | _awake(engine)))
    return GpuKind(
        name=kind.name,
        num_gpus=trainer.num_ranks // trainer.pipeline_parallel,
        phases=tuple(phases),
    )


def _engine_gpu(config: RunConfig, engine: EngineBytes) -> GpuKind:
    # what is received before it is copied into the weights
    items = _awake(engine) | _buckets(config, 1)
    return GpuKind(
        name="engine rank",
        num_gpus=config.num_engines * config.rollout.ranks_per_engine,
        phases=(Phase(name="rollout", items=items), Phase(name="sync", items=items)),
    )


def _state(config: RunConfig, models: Models, kind: RankKind) -> StateBytes:
    """Of the policy and of the critic, where there is one."""
    kinds = [(kind, config.trainer.optimizer)]
    if models.critic is not None:
        layout = ModelLayout(models.critic.family, models.critic.shape)
        of_critic = rank_kinds(layout, config.trainer)[kind.stage]
        kinds.append((of_critic, config.critic.optimizer))
    states = [
        state_bytes(
            one,
            config.trainer,
            itemsize=itemsize_of(config),
            cpu_fraction=optimizer.cpu_offload_fraction,
        )
        for one, optimizer in kinds
    ]
    return StateBytes(
        weights=sum(state.weights for state in states),
        gradients=sum(state.gradients for state in states),
        optimizer=sum(state.optimizer for state in states),
        main_memory=sum(state.main_memory for state in states),
    )


def host_bytes(config: RunConfig, models: Models, engine: EngineBytes, gpus_per_node: int) -> int:
    """Pinned main memory of a node for what leaves its GPUs, or never comes there."""
    layout = ModelLayout(models.policy.family, models.policy.shape)
    states = [_state(config, models, kind) for kind in rank_kinds(layout, config.trainer)]
    offload, rollout = OffloadConfig(), config.rollout
    of_engine = 0
    if config.cluster.placement == "colocated":
        offload = config.trainer.offload
        # while the trainer works, or else while a checkpoint is made
        of_engine = engine.weights
        of_engine += GRAPH_BYTES if rollout.sleep_mode_offload_cudagraph else 0
    has_reference = config.algorithm.objective.kl_coef != 0.0
    of_rank = max(
        state.main_memory
        + (state.optimizer if offload.optimizer == "cpu" else 0)
        # torch rounds each piece of pinned memory up, and a chunk's weights are one
        + (_power_of_two(state.weights) if offload.parameters == "cpu" else 0)
        + (state.weights if has_reference else 0)
        for state in states
    )
    return min(gpus_per_node, config.trainer.num_ranks) * (of_rank + of_engine)


def replayed_bytes(config: RunConfig, model: ModelDescription) -> int:
    """The experts that routers take over in a step of the longest responses: each node has the
    whole batch."""
    if not config.trainer.router_replay:
        return 0
    responses = config.sampling.prompts_per_step * config.sampling.responses_per_prompt
    per_token = model.experts_per_token * number_type(model.shape.num_experts).itemsize
    return responses * longest_sequence(config) * per_token


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


_ITEMS = {"parameters": WEIGHTS, "gradients": GRADIENTS, "optimizer": OPTIMIZER}


def _without(items: dict[str, int], offload: OffloadConfig, *kinds: str) -> dict[str, int]:
    """`items` without those of the kinds that leave the GPU."""
    gone = [_ITEMS[kind] for kind in kinds if getattr(offload, kind) == "cpu"]
    return {name: size for name, size in items.items() if name not in gone}


def _buckets(config: RunConfig, number: int) -> dict[str, int]:
    """What weights travel in, kept from one update to the next."""
    return {"weight buckets": number * int(config.weights.bucket_mib * MIB)}


def _held(state: StateBytes, trainer: TrainerConfig) -> dict[str, int]:
    return {
        WEIGHTS: state.weights,
        GRADIENTS: state.gradients,
        OPTIMIZER: state.optimizer,
        "trainer's CUDA, NCCL": _process_bytes(trainer),
    }


def _start(state: StateBytes, trainer: TrainerConfig) -> dict[str, int]:
    """Weights are copied into the buffers that they are then trained in."""
    return _held(state, trainer) | {WEIGHTS: 2 * state.weights, OPTIMIZER: 0}


def _update(update: UpdateBytes) -> dict[str, int]:
    return {
        "micro-batches": update.inputs,
        "activations": update.activations,
        "one layer's backward, or the head": update.working,
        "between the tensors": int(FRAGMENTATION * update.total),
    }


def _awake(engine: EngineBytes) -> dict[str, int]:
    return {
        "engine weights": engine.weights,
        "engine workspace": engine.workspace,
        "KV cache": engine.cache,
        "engine's CUDA": CONTEXT_BYTES,
    }


def _process_bytes(trainer: TrainerConfig) -> int:
    """A context and the communicators of the groups that a rank is in."""
    sizes = (
        trainer.tensor_parallel,
        trainer.context_parallel,
        trainer.pipeline_parallel,
        trainer.data_parallel,
        trainer.expert_parallel,
        trainer.num_ranks,
    )
    num_groups = sum(size > 1 for size in sizes)
    return CONTEXT_BYTES + num_groups * COMMUNICATOR_BYTES


def sleeping_bytes(config: RunConfig) -> int:
    """What an engine rank keeps of its GPU in its sleep."""
    rollout = config.rollout
    keeps_graphs = not (rollout.enforce_eager or rollout.sleep_mode_offload_cudagraph)
    keeps_buffers = rollout.ranks_per_engine > 1 and not rollout.enable_nccl_comm_suspend
    return CONTEXT_BYTES + keeps_graphs * GRAPH_BYTES + keeps_buffers * COMMUNICATOR_BYTES
