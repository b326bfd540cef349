"""A model as its Hugging Face configuration describes it, as a policy or as a critic.

A critic is a language model with one value in place of the vocabulary. transformers and vLLM call
it a sequence classifier with one label and read the last token; here every token has a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megadapo.models.families import Family, family_of
from megadapo.models.rows import VALUE_HEAD
from megadapo.models.shape import ModelShape, model_shape, required_size

# transformers' defaults
RMS_NORM_EPS = 1e-6
INITIALIZER_RANGE = 0.02

_ROPE_DEFAULTS = {"rope_type": "default", "rope_theta": 10000.0}
_LANGUAGE_MODEL, _VALUE_MODEL = "ForCausalLM", "ForSequenceClassification"

_COMPARED = {
    "architectures": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "vocab_size": None,
    "rms_norm_eps": RMS_NORM_EPS,
    "hidden_act": "silu",
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "moe_intermediate_size": None,
    "num_experts_per_tok": None,
    "norm_topk_prob": None,
}
"""Keys that decide what a model computes, with the default of each."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings: base frequencies, and their scaling for longer contexts."""

    kind: str
    """Name of the scaling; "default": no scaling."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """Context length before the scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rule by which the router of each layer sends a token to experts."""

    experts_per_token: int
    sums_to_one: bool
    """Whether the weights of a token's experts are divided by their sum (norm_topk_prob)."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Everything that the trainer needs to know of a model except its weights."""

    family: Family
    shape: ModelShape
    rope: Rope
    max_positions: int
    """Longest sequence in tokens."""
    rms_norm_eps: float
    hidden_act: str
    sliding_window: int | None
    """Tokens that attention looks back; None: all of them."""
    initializer_range: float
    """Standard deviation of random matrices."""
    routing: Routing | None = None
    """Routing of a model with experts."""

    @property
    def expert_choices_per_token(self) -> int:
        """Number of experts that all layers together choose for a token; 0 without experts."""
        return 0 if self.routing is None else self.shape.num_layers * self.routing.experts_per_token


def describe_model(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Read a Hugging Face configuration."""
    shape = model_shape(hf_config)
    routing = None
    if shape.num_experts:
        routing = Routing(
            experts_per_token=required_size(hf_config, "num_experts_per_tok"),
            sums_to_one=bool(hf_config.get("norm_topk_prob", False)),
        )
    # Qwen2 files have a window that use_sliding_window = false turns off
    has_window = hf_config.get("use_sliding_window", True)
    return ModelDescription(
        family=family_of(hf_config),
        shape=shape,
        rope=read_rope(hf_config),
        max_positions=required_size(hf_config, "max_position_embeddings"),
        rms_norm_eps=hf_config.get("rms_norm_eps", RMS_NORM_EPS),
        hidden_act=hf_config.get("hidden_act", "silu"),
        sliding_window=(hf_config.get("sliding_window") or None) if has_window else None,
        initializer_range=hf_config.get("initializer_range", INITIALIZER_RANGE),
        routing=routing,
    )


def describe_critic(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Read the configuration of a language model or of a saved critic; describe the critic."""
    names = [
        name.replace(_VALUE_MODEL, _LANGUAGE_MODEL) for name in hf_config.get("architectures") or []
    ]
    model = describe_model({**hf_config, "architectures": names})
    return replace(
        model,
        family=replace(model.family, head=VALUE_HEAD),
        shape=replace(model.shape, tied=False),
    )


def critic_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a critic made from the language model of `hf_config`."""
    names = [
        name.replace(_LANGUAGE_MODEL, _VALUE_MODEL) for name in hf_config.get("architectures") or []
    ]
    return {
        **hf_config,
        "architectures": names,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "tie_word_embeddings": False,
    }


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return one phrase per key in which two configurations describe different models."""
    left, right = _comparable(a), _comparable(b)
    return [
        f"{key} is {left.get(key)!r} against {right.get(key)!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _comparable(hf_config: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys that decide what a model computes, old and new spellings unified."""
    values = {key: hf_config.get(key, default) for key, default in _COMPARED.items()}
    family = family_of(hf_config)
    heads = hf_config.get("num_attention_heads")
    values["num_key_value_heads"] = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim")
    if head_dim is None and heads:
        head_dim = hf_config.get("hidden_size", 0) // heads
    values["head_dim"] = head_dim
    values["num_experts"] = hf_config.get("num_experts", hf_config.get("num_local_experts"))
    values["tie_word_embeddings"] = hf_config.get("tie_word_embeddings", family.tied_by_default)
    bias = family.attention_bias
    values["attention_bias"] = hf_config.get("attention_bias", False) if bias is None else bias
    return values | {f"rope.{key}": value for key, value in _rope_settings(hf_config).items()}


def read_rope(hf_config: Mapping[str, Any]) -> Rope:
    settings = _rope_settings(hf_config)
    names = {"original_max_positions": "original_max_position_embeddings"}
    names |= {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
    given = {name: settings[key] for name, key in names.items() if key in settings}
    return Rope(kind=settings["rope_type"], theta=float(settings["rope_theta"]), **given)


def _rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all rotary settings, from `rope_parameters` (transformers 5) or the older keys."""
    scaling = dict(hf_config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    older = {"rope_theta": hf_config["rope_theta"]} if "rope_theta" in hf_config else {}
    newer = hf_config.get("rope_parameters") or {}
    return _ROPE_DEFAULTS | older | scaling | newer
