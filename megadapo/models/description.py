"""Everything megadapo knows of a model, read once from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megadapo.models.families.family import Family
from megadapo.models.families.registry import family_of
from megadapo.models.rope import Rope, read_rope
from megadapo.models.shape import ModelShape, model_shape, required_size

RMS_NORM_EPS = 1e-6
INITIALIZER_RANGE = 0.02
"""What transformers takes where a configuration is silent."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the router of each layer sends a token to experts."""

    experts_per_token: int
    sums_to_one: bool
    """Whether the weights of a token's experts are divided by their sum (norm_topk_prob)."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as its config.json describes it, without any weight."""

    family: Family
    shape: ModelShape
    rope: Rope
    max_positions: int
    """Longest sequence in tokens."""
    rms_norm_eps: float
    hidden_act: str
    sliding_window: int | None
    """Tokens an attention looks back; None: all of them."""
    initializer_range: float
    """Standard deviation of random matrices."""
    routing: Routing | None = None
    """Of a model with experts."""

    @property
    def experts_per_token(self) -> int:
        """Of all layers together; 0 without experts."""
        return 0 if self.routing is None else self.shape.num_layers * self.routing.experts_per_token


def describe_model(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Read a Hugging Face configuration.

    Raises:
        WeightError: the family is not known, or a size is missing; it names the key.
    """
    shape = model_shape(hf_config)
    return ModelDescription(
        family=family_of(hf_config),
        shape=shape,
        rope=read_rope(hf_config),
        max_positions=required_size(hf_config, "max_position_embeddings"),
        rms_norm_eps=hf_config.get("rms_norm_eps", RMS_NORM_EPS),
        hidden_act=hf_config.get("hidden_act", "silu"),
        sliding_window=_sliding_window(hf_config),
        initializer_range=hf_config.get("initializer_range", INITIALIZER_RANGE),
        routing=_routing(hf_config) if shape.num_experts else None,
    )


def _routing(hf_config: Mapping[str, Any]) -> Routing:
    return Routing(
        experts_per_token=required_size(hf_config, "num_experts_per_tok"),
        sums_to_one=bool(hf_config.get("norm_topk_prob", False)),
    )


def _sliding_window(hf_config: Mapping[str, Any]) -> int | None:
    """Qwen2 files carry a window that use_sliding_window = false turns off."""
    is_used = hf_config.get("use_sliding_window", True)
    return hf_config.get("sliding_window") or None if is_used else None
