"""Rotary position embeddings as a model's config.json states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEFAULTS = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The base frequencies, and how they are scaled for longer contexts."""

    kind: str
    """Name of the scaling, "default" where there is none."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """Context length before the scaling, in tokens."""


def rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """All rotary settings, from `rope_parameters` (transformers 5) or the several older keys."""
    scaling = dict(hf_config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    older = {"rope_theta": hf_config["rope_theta"]} if "rope_theta" in hf_config else {}
    newer = hf_config.get("rope_parameters") or {}
    return _DEFAULTS | older | scaling | newer


def read_rope(hf_config: Mapping[str, Any]) -> Rope:
    """The settings that scalings known to the trainer have."""
    settings = rope_settings(hf_config)
    names = {"original_max_positions": "original_max_position_embeddings"}
    names |= {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
    given = {name: settings[key] for name, key in names.items() if key in settings}
    return Rope(kind=settings["rope_type"], theta=float(settings["rope_theta"]), **given)
