"""Memory plan: each kind of GPU in each phase of a run.

Phases have the names of the run's status and are in its order. "restart engine" is the only other
one: it is inside a rollout. The first "sync" has the name "publish weights" in the status. Engines
that share GPUs wake at the end of "sync", and then need the memory of "rollout".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache

from megadapo.cluster.machine import inspect_machine
from megadapo.config import RunConfig
from megadapo.data.group import expert_dtype
from megadapo.models.description import ModelDescription, describe_critic, describe_model
from megadapo.models.folder import find_hf_config
from megadapo.plan.cards import GIB, MIB, Card
from megadapo.plan.ranks import (
    COMMUNICATOR_BYTES,
    FRAGMENTATION,
    GRAPH_BYTES,
    EngineBytes,
    RankKind,
    StateBytes,
    engine_bytes,
    engine_process_bytes,
    itemsize_of,
    rank_kinds,
    sleeping_bytes,
    state_bytes,
    table_bytes,
    trainer_process_bytes,
)
from megadapo.plan.training import UpdateLoad, update_bytes
from megadapo.trainer.config import StateKind, TrainerConfig
from megadapo.weights.layout.layout import ModelLayout

BUCKETS_IN_FLIGHT = 2
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
TEACHER = "teacher's weights"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase on one kind of GPU: bytes by purpose."""

    name: str
    items: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """GPUs with equal memory plans."""

    name: str
    num_gpus: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, kw_only=True)
class Models:
    """Descriptions of a run's models."""

    policy: ModelDescription
    critic: ModelDescription | None = None
    teacher: ModelDescription | None = None


def models_of(config: RunConfig) -> Models:
    """Return the run's models from their folders or the built-in list; nothing is downloaded."""
    policy = find_hf_config(config.model.path)
    critic, teacher = None, None
    if config.algorithm.advantage == "gae":
        path = config.critic.path
        found = policy if path is None else find_hf_config(path, key="critic.path")
        critic = describe_critic(found)
    if (path := config.algorithm.reference.path) is not None:
        teacher = describe_model(find_hf_config(path, key="algorithm.reference.path"))
    return Models(policy=describe_model(policy), critic=critic, teacher=teacher)


def gpu_kinds(config: RunConfig, models: Models, card: Card) -> list[GpuKind]:
    """Return every kind of GPU of the run, the trainer's stages first."""
    layout = ModelLayout(models.policy.family, models.policy.shape)
    engine = engine_bytes(config, models.policy, card)
    kinds = [
        _trainer_gpu(config, models, kind, engine) for kind in rank_kinds(layout, config.trainer)
    ]
    if config.cluster.placement == "separate":
        kinds.append(_engine_gpu(config, engine))
    return kinds


def update_load(config: RunConfig, trainer: TrainerConfig) -> UpdateLoad:
    """Return the largest load of a rank: every response has the maximum length."""
    longest = longest_sequence(config)
    tokens = max(trainer.tokens_per_micro_batch, longest)
    share = -(-config.algorithm.responses_per_mini_batch // trainer.data_parallel) * longest
    # each sequence is split into two chunks per context-parallel rank
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
    """Describe the phase with the largest memory."""
    phase, kind = max(
        ((phase, kind) for kind in kinds for phase in kind.phases), key=lambda pair: pair[0].total
    )
    article = "an" if kind.name[0] in "aeiou" else "a"
    return f"{article} {kind.name} is fullest in {phase.name}, with {phase.total / GIB:.1f} GiB"


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _trainer_gpu(config: RunConfig, models: Models, kind: RankKind, engine: EngineBytes) -> GpuKind:
    trainer = config.trainer
    state = _state(config, models, kind)
    process = {"trainer's CUDA, NCCL": trainer_process_bytes(config)}
    own = {WEIGHTS: state.weights, GRADIENTS: state.gradients, OPTIMIZER: state.optimizer}
    kept = own | process | _buckets(config, BUCKETS_IN_FLIGHT)
    kept["position tables"] = table_bytes(config, head_dim=models.policy.shape.head_dim)
    # weights are copied into the trainer's buffers before the optimizer exists
    loading = own | {WEIGHTS: 2 * state.weights, OPTIMIZER: 0}
    start = max(loading, own, key=lambda items: sum(items.values())) | process
    # in main memory otherwise
    teacher = {TEACHER: _teacher_bytes(config, models, kind.stage)} if models.teacher else {}
    start, temporary = start | teacher, _update_items(config, models, kind) | teacher
    if config.cluster.placement == "separate":
        phases = [
            Phase(name="start trainer", items=start),
            Phase(name="train", items=kept | temporary),
            Phase(name="sync", items=kept),
            Phase(name="checkpoint", items=kept),
        ]
    else:
        asleep = {"engine, asleep": sleeping_bytes(config)}
        idle = _without(kept, trainer.offload, "gradients", "optimizer")
        generating = _without(idle, trainer.offload, "parameters")
        phases = [
            Phase(name="start engines", items=_starting(config, engine)),
            Phase(name="start trainer", items=start | asleep),
            Phase(name="rollout", items=generating | _awake(config, engine)),
            Phase(
                name="restart engine",
                items=generating | _starting(config, engine) | _repacked(engine),
            ),
            Phase(name="train", items=kept | asleep | temporary),
            Phase(
                name="sync",
                items=idle | asleep | {"engine weights": engine.weights} | _repacked(engine),
            ),
            # it reads offloaded state in main memory
            Phase(name="checkpoint", items=generating | _awake(config, engine)),
        ]
    return GpuKind(
        name=kind.name,
        num_gpus=trainer.num_ranks // trainer.pipeline_parallel,
        phases=tuple(phases),
    )


def _teacher_bytes(config: RunConfig, models: Models, stage: int) -> int:
    """Return the teacher's weights on a rank of a pipeline stage; 0 without a teacher."""
    if models.teacher is None:
        return 0
    layout = ModelLayout(models.teacher.family, models.teacher.shape)
    return rank_kinds(layout, config.trainer)[stage].num_parameters * itemsize_of(config)


@cache
def plans_own_layers() -> bool:
    """Return whether a plan is of our own layers: this machine's GPUs lack Transformer Engine."""
    machine = inspect_machine()
    return machine.uses_cuda and machine.packages["transformer-engine"] is None


def _update_items(config: RunConfig, models: Models, kind: RankKind) -> dict[str, int]:
    """Return what exists only while a rank computes old log-probs and updates."""
    update = update_bytes(
        models.policy,
        config.trainer,
        kind,
        update_load(config, config.trainer),
        itemsize=itemsize_of(config),
        layers="own" if plans_own_layers() else "transformer-engine",
    )
    return update | {"between the tensors": int(FRAGMENTATION * sum(update.values()))}


def _engine_gpu(config: RunConfig, engine: EngineBytes) -> GpuKind:
    # the bucket holds received weights until they are copied; its group is of engines and trainer
    items = _awake(config, engine) | _buckets(config, 1)
    items["engine's CUDA, NCCL"] += COMMUNICATOR_BYTES
    return GpuKind(
        name="engine rank",
        num_gpus=config.num_engines * config.rollout.ranks_per_engine,
        phases=(
            Phase(name="start engines", items=_starting(config, engine)),
            Phase(name="rollout", items=items),
            Phase(name="sync", items=items | _repacked(engine)),
        ),
    )


def _state(config: RunConfig, models: Models, kind: RankKind) -> StateBytes:
    """Return the state of the policy and of any critic."""
    kinds = [(kind, config.trainer.optimizer)]
    if models.critic is not None:
        layout = ModelLayout(models.critic.family, models.critic.shape)
        critic_kind = rank_kinds(layout, config.trainer)[kind.stage]
        kinds.append((critic_kind, config.critic.optimizer.completed_by(config.trainer.optimizer)))
    states = [
        state_bytes(
            one,
            config.trainer,
            itemsize=itemsize_of(config),
            cpu_fraction=optimizer.cpu_offload_fraction,
        )
        for one, optimizer in kinds
    ]
    return StateBytes(*map(sum, zip(*map(astuple, states), strict=True)))


def host_items(config: RunConfig, models: Models, card: Card, gpus_per_node: int) -> dict[str, int]:
    """Return a node's main memory by purpose; the processes' own memory is extra."""
    layout = ModelLayout(models.policy.family, models.policy.shape)
    kinds = rank_kinds(layout, config.trainer)
    states = [_state(config, models, kind) for kind in kinds]
    teachers = [_teacher_bytes(config, models, stage) for stage in range(len(states))]
    offload: tuple[StateKind, ...] = ()
    engine_share = 0
    if config.cluster.placement == "colocated":
        offload = config.trainer.offload
        if config.weights.mode == "delta":
            # engines keep them while the trainer works
            engine_share += engine_bytes(config, models.policy, card).weights
        if config.rollout.vllm.get("sleep_mode_offload_cudagraph"):
            engine_share += GRAPH_BYTES
    algorithm = config.algorithm
    has_reference = algorithm.objective.kl_coef != 0.0 and algorithm.reference.path is None
    trainer_share = max(
        state.main_memory
        + (state.optimizer if "optimizer" in offload else 0)
        # torch rounds a pinned block up to a power of two, and a chunk's weights are one block
        + (1 << (state.weights - 1).bit_length() if "parameters" in offload else 0)
        + (state.weights if has_reference else 0)
        + teacher
        for state, teacher in zip(states, teachers, strict=True)
    )
    # `weights/sync/sender.py:WeightSender.pin` copies the weights published last, if engines join
    # or restart beside an update, and the evaluated weights, if an engine is for evaluations
    evaluates = config.evaluation.every > 0 and config.evaluation.placement == "engine"
    num_copies = (config.sampling.mode == "async") + evaluates
    shares = {
        "offloaded by the trainer": trainer_share,
        "weights of sleeping engines": engine_share,
        "snapshot of a save": max(state.snapshot for state in states),
        "weights for engines that join or evaluate": num_copies
        * max(kind.num_parameters for kind in kinds)
        * itemsize_of(config),
    }
    num_ranks = min(gpus_per_node, config.trainer.num_ranks)
    return {name: num_ranks * share for name, share in shares.items()}


def replayed_bytes(config: RunConfig, model: ModelDescription) -> int:
    """Return a node's bytes of replayed expert choices in a step of the longest responses.

    Each node has the whole batch.
    """
    if not config.trainer.router_replay:
        return 0
    responses = config.sampling.prompts_per_step * config.sampling.responses_per_prompt
    per_token = model.expert_choices_per_token * expert_dtype(model.shape.num_experts).itemsize
    return responses * longest_sequence(config) * per_token


_ITEMS: dict[StateKind, str] = {
    "parameters": WEIGHTS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
}


def _without(
    items: dict[str, int], offload: Sequence[StateKind], *kinds: StateKind
) -> dict[str, int]:
    """Return `items` without the offloaded ones among `kinds`."""
    offloaded = [_ITEMS[kind] for kind in kinds if kind in offload]
    return {name: size for name, size in items.items() if name not in offloaded}


def _buckets(config: RunConfig, number: int) -> dict[str, int]:
    """Return the weight buckets, which stay allocated between updates."""
    return {"weight buckets": number * int(config.weights.bucket_mib * MIB)}


def _awake(config: RunConfig, engine: EngineBytes) -> dict[str, int]:
    return {
        "engine weights": engine.weights,
        "engine workspace": engine.workspace,
        "KV cache": engine.cache,
        "engine's CUDA, NCCL": engine_process_bytes(config.rollout),
    }


def _starting(config: RunConfig, engine: EngineBytes) -> dict[str, int]:
    """Return what an engine needs at its start: vLLM refuses to start without its whole budget."""
    budget = engine.weights + engine.workspace + engine.cache
    return {
        "engine's free budget": budget,
        "engine's CUDA, NCCL": engine_process_bytes(config.rollout),
    }


def _repacked(engine: EngineBytes) -> dict[str, int]:
    return {"engine's layer to repack": engine.repacked} if engine.repacked else {}
