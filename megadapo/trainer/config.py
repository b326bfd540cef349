"""What is trained and how it is split: the `[model]` and `[trainer]` sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megadapo.errors import ConfigError

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
"""`model_type` of the models that the trainer can build."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary scalings that the trainer knows."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train: the `[model]` section."""

    path: str
    """Hugging Face model: a folder, or a name on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Whether weights are read from the folder, or drawn at random from its config.json alone."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; logits, statistics, gradients and Adam are always fp32."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("model.path must name a Hugging Face model folder or Hub model")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW in fp32, sharded over data-parallel ranks: the `[trainer.optimizer]` section."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    warmup_steps: int = 20
    """Rollout steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    decay_steps: int = 0
    """Rollout step at which the cosine reaches `min_lr`; only for schedule = "cosine"."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; biases and norms get none."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's term against division by zero."""
    grad_clip: float = 1.0
    """Bound on the global gradient norm of an update; 0 turns clipping off."""

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "weight_decay", "grad_clip"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"trainer.optimizer.{name} = {getattr(self, name)} must not be negative"
                )
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"trainer.optimizer.{name} = {getattr(self, name)} is not in [0, 1)"
                )
        if self.eps <= 0.0:
            raise ConfigError(f"trainer.optimizer.eps = {self.eps} must be positive")
        if self.warmup_steps < 0:
            raise ConfigError("trainer.optimizer.warmup_steps must not be negative")
        if self.schedule == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"trainer.optimizer.decay_steps = {self.decay_steps} must be above warmup_steps = "
                f'{self.warmup_steps} where schedule = "cosine"'
            )
        if self.schedule == "constant" and self.decay_steps != 0:
            raise ConfigError(
                'trainer.optimizer.decay_steps has no effect with schedule = "constant"; set '
                'schedule = "cosine" or leave it out'
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of rollout step `step` (the first is 1), the same for all its updates."""
        assert step >= 1, step
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.min_lr + (self.lr - self.min_lr) * cosine


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the trainer's ranks share the model and the batch: the `[trainer]` section."""

    tensor_parallel: int = 1
    """Ranks that share each weight matrix."""
    pipeline_parallel: int = 1
    """Stages that share the layers."""
    data_parallel: int = 1
    """Copies of the model that share the batch."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks too, to save activation memory."""
    tokens_per_micro_batch: int = 16384
    """Token budget of one forward pass per data-parallel rank; a longer sequence goes alone."""
    recompute: bool = False
    """Keep only each layer's input and compute the rest again: less memory, a third more work."""
    num_threads: int = 0
    """CPU threads of each rank; 0 shares the machine's cores out over its ranks."""
    start_timeout_s: float = 1800.0
    """Seconds the ranks may take to start, form their groups and read the weights."""
    timeout_s: float = 1800.0
    """Seconds that a step's updates, a save or a load may take, or one collective in them."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name} = {getattr(self, name)} must be at least 1")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "trainer.sequence_parallel splits over the tensor-parallel ranks: set "
                "trainer.tensor_parallel above 1, or turn it off"
            )
        if self.tokens_per_micro_batch < 1:
            raise ConfigError("trainer.tokens_per_micro_batch must be at least 1")
        if self.num_threads < 0:
            raise ConfigError("trainer.num_threads must not be negative")
        if self.start_timeout_s <= 0 or self.timeout_s <= 0:
            raise ConfigError("trainer.start_timeout_s and trainer.timeout_s must be positive")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def validate_model_layout(hf_config: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Refuse a model the trainer does not know, or a split that its sizes do not allow.

    The vocabulary is padded and always divides.

    Raises:
        ConfigError: names every key that does not fit and the sizes that would.
    """
    if "model_type" in hf_config:
        validate_architecture(hf_config)
    num_heads = _size(hf_config, "num_attention_heads")
    split_by_tensor = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": hf_config.get("num_key_value_heads") or num_heads,
        "intermediate_size": _size(hf_config, "intermediate_size"),
    }
    problems = [
        _misfit("tensor_parallel", trainer.tensor_parallel, name, size, split_by_tensor.values())
        for name, size in split_by_tensor.items()
        if size % trainer.tensor_parallel
    ]
    num_layers = _size(hf_config, "num_hidden_layers")
    if num_layers % trainer.pipeline_parallel:
        problems.append(
            _misfit(
                "pipeline_parallel",
                trainer.pipeline_parallel,
                "num_hidden_layers",
                num_layers,
                [num_layers],
            )
        )
    if problems:
        raise ConfigError("\n".join(problems))


def validate_architecture(hf_config: Mapping[str, Any]) -> None:
    """Refuse a model, or an option of one, that the trainer would compute wrongly.

    Raises:
        ConfigError: names the key of its config.json.
    """
    kind = hf_config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: model_type {kind!r} is not supported; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"model.path: hidden_act {hf_config['hidden_act']!r} is not supported")
    for name in ("attention_bias", "mlp_bias"):
        if kind != "qwen2" and hf_config.get(name):
            raise ConfigError(f"model.path: {name} is not supported for {kind}")
    # Qwen2 files carry a window that use_sliding_window = false turns off
    if hf_config.get("sliding_window") and hf_config.get("use_sliding_window", True):
        raise ConfigError("model.path: attention with a sliding_window is not supported")
    rope_parameters(hf_config)


def rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters; transformers 5 keeps them in one table, older files in several keys.

    Raises:
        ConfigError: the scaling is not one of `ROPE_TYPES`.
    """
    table = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    table.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    table["rope_type"] = table.get("rope_type", table.get("type", "default"))
    if table["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"model.path: rotary scaling {table['rope_type']!r} is not supported; known are "
            f"{', '.join(ROPE_TYPES)}"
        )
    return table


def _size(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model.path: its config.json has no usable {name} (found {value!r})")
    return value


def _misfit(key: str, parts: int, name: str, size: int, sizes: Any) -> str:
    common = math.gcd(*sizes)
    fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return (
        f"trainer.{key} = {parts} does not divide the model's {name} = {size}; "
        f"sizes that fit this model: {fitting}"
    )
