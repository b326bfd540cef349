"""One short table per model family; adding a dense family is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families import llama, mistral, qwen2, qwen3, qwen3_moe
from megadapo.models.families.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (qwen2, qwen3, qwen3_moe, llama, mistral)
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a Hugging Face configuration names."""
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise WeightError(
        f"config.json: no layout for architectures={architectures}; megadapo knows "
        f"{', '.join(FAMILIES)}."
    )


__all__ = ["FAMILIES", "Family", "family_of"]
