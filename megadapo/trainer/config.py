"""The `[model]`, `[trainer]` and `[critic]` sections: models and their split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megadapo.section import ModelPath, Pair, Section, Timeout

ADAM_EPS = 1e-8
"""Adam's term against division by zero."""
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
StateKind = Literal["optimizer", "gradients", "parameters"]
"""Kind of a rank's state that can leave the GPU."""


class ModelConfig(Section, title="model"):
    """The model to train."""

    path: ModelPath
    """Hugging Face model: a folder, or a name on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Source of the first weights: the folder, or random numbers (only config.json is read)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; logits, statistics, gradients and Adam are always fp32."""

    def conflicts(self) -> Iterator[str]:
        if not self.path:
            yield "model.path must name a Hugging Face model folder or Hub model"


class OptimizerConfig(Section, title="trainer.optimizer"):
    """AdamW in fp32, sharded over the ranks with the same weights."""

    lr: NonNegativeFloat = 1e-6
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Rollout steps over which the learning rate rises linearly to `lr`."""
    decay_steps: NonNegativeInt = 0
    """Rollout step at which a cosine that starts after warm-up reaches `min_lr`; 0: the learning
    rate stays at `lr`."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the cosine."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; biases and norms get none."""
    betas: Pair[Decay] = (0.9, 0.999)
    """Decay of Adam's first and second moment."""
    grad_clip: NonNegativeFloat = 1.0
    """Bound on the global gradient norm of an update; 0 turns clipping off."""
    cpu_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the weights whose moments and fp32 masters stay in main memory, where the CPU
    updates them (Megatron's hybrid optimizer); only with CUDA and model.dtype = "bfloat16"."""

    def conflicts(self) -> Iterator[str]:
        if 0 < self.decay_steps <= self.warmup_steps:
            yield (
                f"trainer.optimizer.decay_steps = {self.decay_steps} must be 0 or above "
                f"trainer.optimizer.warmup_steps = {self.warmup_steps}"
            )
        if self.decay_steps == 0 and self.changed("min_lr"):
            yield (
                "trainer.optimizer.min_lr: used only with trainer.optimizer.decay_steps; leave it "
                "out, or set that"
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of all updates of rollout step `step`, counted from 1."""
        assert step >= 1, step
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.decay_steps == 0:
            return self.lr
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.min_lr + (self.lr - self.min_lr) * cosine


class TrainerConfig(Section, title="trainer"):
    """Split of the model and the batch over the trainer's ranks."""

    tensor_parallel: PositiveInt = 1
    """Ranks that share each weight matrix."""
    pipeline_parallel: PositiveInt = 1
    """Stages that share the layers."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers per stage (interleaved 1F1B): shorter waits, more messages."""
    first_stage_layers: NonNegativeInt = 0
    """Layers of the first stage, which also has the embedding; 0: the same as other stages."""
    last_stage_layers: NonNegativeInt = 0
    """Layers of the last stage, which also has the policy head; 0: the same as other stages."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of each sequence, and so its activations."""
    data_parallel: PositiveInt = 1
    """Copies of the model that share the batch."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each layer: tensor-, context- and data-parallel ranks of one
    stage, not additional ones."""
    expert_tensor_parallel: PositiveInt = 1
    """Ranks that share the matrices of each expert; 1: experts are not split."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of each router's load-balancing loss in an update; 0: none. It uses the routing of the
    whole step, so it does not depend on the split. Critics and reward models have no such loss."""
    router_replay: bool = False
    """Send each token to the experts that the engine chose, in log-prob passes and updates; only
    models with experts. It costs layers x experts per token bytes for each token of a step."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks too, to save activation memory."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Token budget of one forward pass per copy of the model, shared by its context-parallel ranks;
    a longer sequence is a micro-batch of its own."""
    recompute: tuple[Literal["core_attn", "mlp"], ...] | Literal["full"] = ()
    """Activations that are computed again for the backward pass instead of being kept: those of
    parts of each layer, or with "full" all but each layer's input (least memory, a third more
    work). The MLP keeps two thirds of a layer's activations; fused attention keeps few."""
    overlap_data_parallel: bool = False
    """Sum gradients over the data-parallel ranks while the last backward pass still runs, and
    gather updated weights while the next forward pass already runs. The second helps with two or
    more updates per step: after the last, all weights are gathered at once."""
    bucket_parameters: NonNegativeInt = 0
    """Parameters per message of this overlap, on the first stage's first chunk (other chunks send
    one message each); 0: megatron-core's choice, 40 million or more."""
    deterministic: bool = False
    """Use only deterministic algorithms on GPUs, which are slower. The first ratio is then exactly
    1, and a step with another ratio ends the run. The policy head's log-probs, entropy and loss of
    equal hidden states then have the same bits for tensor_parallel 1, 2, 4 and 8, as on CPUs; its
    products then take an estimated 2 % longer."""
    timeout_s: Timeout = 1800.0
    """Time limit in seconds of a save, of a load, and of one collective. A rank without a heartbeat
    for a third of it counts as hung. In updates and log-probs, so does one without a micro-batch
    for a third of it and for ten times the slowest recent one."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the policy."""
    offload: tuple[StateKind, ...] = ()
    """State that moves to pinned main memory while engines use the same GPUs
    (rollout.gpu_memory_utilization); only with cluster.placement = "colocated". Training computes
    the same bits. optimizer: Adam's moments and fp32 masters are on the GPU only in updates and
    loads, and are copied back while a step's first log-probs are computed; a save reads them in
    main memory. gradients: the buffers are on the GPU only in updates. Each update starts with
    zeros, so nothing is copied. parameters: weights are off the GPU while engines generate. An
    engine that restarts meanwhile gets them from main memory."""

    @property
    def progress_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a rank counts as hung.

        Fewer than a collective may take, whose error would not name the rank.
        """
        return max(1.0, self.timeout_s / 3)

    def conflicts(self) -> Iterator[str]:
        if self.pipeline_parallel == 1:
            for name in ("first_stage_layers", "last_stage_layers"):
                if getattr(self, name):
                    yield (
                        f"trainer.{name} = {getattr(self, name)} has no effect with one stage: set "
                        "trainer.pipeline_parallel above 1, or leave it out"
                    )
            if self.virtual_pipeline > 1:
                yield (
                    f"trainer.virtual_pipeline = {self.virtual_pipeline} interleaves the chunks of "
                    "several stages: set trainer.pipeline_parallel above 1, or leave it out"
                )
        if self.bucket_parameters and not self.overlap_data_parallel:
            yield (
                f"trainer.bucket_parameters = {self.bucket_parameters} has no effect without "
                "trainer.overlap_data_parallel = true"
            )
        per_stage = self.tensor_parallel * self.num_replicas
        if per_stage % (self.expert_parallel * self.expert_tensor_parallel):
            yield (
                f"trainer.expert_parallel = {self.expert_parallel} x trainer.expert_tensor_parallel"
                f" = {self.expert_tensor_parallel} must divide the {per_stage} ranks of a stage "
                "(trainer.tensor_parallel x trainer.context_parallel x trainer.data_parallel), "
                "which share the experts"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield (
                "trainer.sequence_parallel splits over the tensor-parallel ranks: set "
                "trainer.tensor_parallel above 1, or turn it off"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Number of ranks with the same weights: they sum gradients and shard Adam."""
        return self.data_parallel * self.context_parallel


class CriticOptimizerConfig(Section, title="critic.optimizer"):
    """AdamW of the critic, on the policy's step count. Everything that is not here is as in
    `[trainer.optimizer]`."""

    lr: NonNegativeFloat = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Rollout steps over which the learning rate rises linearly to `lr`."""

    def completed_by(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Return the critic's optimizer: these values, and the policy's for all others."""
        return policy.model_copy(update=dict(self))


class CriticConfig(Section, title="critic"):
    """The critic of algorithm.advantage = "gae": a model that gives a value per token. It is on the
    trainer's ranks and split like the policy."""

    path: ModelPath | None = None
    """Hugging Face model to start from, with the policy's vocabulary: a language model (its value
    head starts at 0) or an exported critic; by default model.path."""
    warmup: NonNegativeInt = 0
    """Number of first steps that train only the critic."""
    value_clip: PositiveFloat | None = 0.2
    """Largest change of a token's value in a step before its gradient is clipped."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Optimizer of the critic."""
