"""A model as its Hugging Face configuration describes it, as a policy or as a critic.

A critic is a language model with one value in place of the vocabulary. transformers and vLLM call
it a sequence classifier with one label and read the last token; here every token has a value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families import Family, architectures, family_of
from megadapo.models.keys import check_keys
from megadapo.models.rows import VALUE_HEAD
from megadapo.models.shape import ModelShape, model_shape, required_size

# transformers' defaults
RMS_NORM_EPS = 1e-6
INITIALIZER_RANGE = 0.02

_ROPE_THETA = 10000.0
ROPE_KINDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
}
"""Settings of each supported rotary scaling, with their names in `Rope`."""
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
    initializer_range: float
    """Standard deviation of random matrices."""
    routing: Routing | None = None

    @property
    def expert_choices_per_token(self) -> int:
        """Number of experts that all layers together choose for a token; 0 without experts."""
        return 0 if self.routing is None else self.shape.num_layers * self.routing.experts_per_token


def describe_model(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Read a Hugging Face configuration; raise WeightError if the trainer does not support it."""
    shape, family = model_shape(hf_config), family_of(hf_config)
    check_keys(hf_config, family)
    routing = None
    if shape.num_experts:
        routing = Routing(
            experts_per_token=required_size(hf_config, "num_experts_per_tok"),
            sums_to_one=bool(hf_config.get("norm_topk_prob", False)),
        )
        if routing.experts_per_token > shape.num_experts:
            raise WeightError(
                f"config.json: num_experts_per_tok = {routing.experts_per_token} is above "
                f"num_experts = {shape.num_experts}"
            )
        if routing.experts_per_token == 1 and routing.sums_to_one:
            raise WeightError(
                "config.json: norm_topk_prob with num_experts_per_tok = 1 gives every expert the "
                "weight 1, so that no router could learn"
            )
    return ModelDescription(
        family=family,
        shape=shape,
        rope=read_rope(hf_config),
        max_positions=required_size(hf_config, "max_position_embeddings"),
        rms_norm_eps=_positive(hf_config, "rms_norm_eps", RMS_NORM_EPS),
        initializer_range=_positive(hf_config, "initializer_range", INITIALIZER_RANGE),
        routing=routing,
    )


def describe_critic(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Read the configuration of a language model or of a saved critic; describe the critic."""
    names = [name.replace(_VALUE_MODEL, _LANGUAGE_MODEL) for name in architectures(hf_config)]
    model = describe_model({**hf_config, "architectures": names})
    return replace(
        model,
        family=replace(model.family, head=VALUE_HEAD),
        shape=replace(model.shape, tied=False),
    )


def describe_stored(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Describe the model whose weights are beside a configuration: a policy or a critic."""
    is_critic = any(name.endswith(_VALUE_MODEL) for name in architectures(hf_config))
    return describe_critic(hf_config) if is_critic else describe_model(hf_config)


def critic_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a critic made from the language model of `hf_config`."""
    names = [name.replace(_LANGUAGE_MODEL, _VALUE_MODEL) for name in architectures(hf_config)]
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
    family, shape = family_of(hf_config), model_shape(hf_config)
    values["num_key_value_heads"], values["head_dim"] = shape.num_kv_heads, shape.head_dim
    values["num_experts"] = hf_config.get("num_experts", hf_config.get("num_local_experts"))
    values["tie_word_embeddings"] = hf_config.get("tie_word_embeddings", False)
    values["attention_bias"] = hf_config.get("attention_bias", family.has_qkv_bias)
    return values | {f"rope.{key}": value for key, value in _rope_settings(hf_config).items()}


def read_rope(hf_config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding as transformers does.

    Raise WeightError if it is not supported, lacks a setting, or is given twice and differs.
    """
    settings = _rope_settings(hf_config)
    kind, theta = settings.pop("rope_type"), settings.pop("rope_theta")
    if kind not in [*ROPE_KINDS]:  # it may be a list, which has no hash
        raise WeightError(
            f"config.json: rotary scaling {kind!r} is not supported; known are "
            f"{', '.join(ROPE_KINDS)}"
        )
    if settings.keys() != set(ROPE_KINDS[kind]):
        raise WeightError(
            f"config.json: rotary scaling {kind!r} has the settings {', '.join(settings)}, "
            f"expected are {', '.join(ROPE_KINDS[kind]) or 'none'}"
        )
    for key in settings:
        _positive(settings, key)
    return Rope(
        kind=kind,
        theta=float(_positive({"rope_theta": theta}, "rope_theta")),
        **{ROPE_KINDS[kind][key]: value for key, value in settings.items()},
    )


def _positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; the default stands for null or none."""
    value = default if settings.get(key) is None else settings[key]
    # True is an int, and 10**400 is no float
    largest = sys.float_info.max
    if not isinstance(value, int | float) or value is True or not 0 < value <= largest:
        raise WeightError(f"config.json: {key} must be a positive number, but it is {value!r}")
    return value


def _rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all rotary settings; `rope_scaling` is the older name of `rope_parameters`."""
    given = filter(None, map(hf_config.get, ("rope_scaling", "rope_parameters")))
    blocks = [_completed_rope(block, hf_config) for block in [*given] or [{}]]
    if blocks[0] != blocks[-1]:
        raise WeightError(
            f"config.json: rope_scaling means {blocks[0]} and rope_parameters {blocks[1]}: delete "
            "one of them (transformers takes rope_scaling)"
        )
    return blocks[0]


def _completed_rope(block: object, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one block with transformers' defaults."""
    if not isinstance(block, Mapping):
        raise WeightError(f"config.json: the rotary settings {block!r:.200} are not a table")
    own = {key: value for key, value in block.items() if value is not None}
    kind, theta = own.pop("type", "default"), hf_config.get("rope_theta", _ROPE_THETA)
    settings = {"rope_type": kind, "rope_theta": theta} | own
    if settings["rope_type"] == "llama3":
        length = hf_config.get("max_position_embeddings")
        settings.setdefault("original_max_position_embeddings", length)
    if settings.get("partial_rotary_factor") == 1.0:
        del settings["partial_rotary_factor"]
    return settings
