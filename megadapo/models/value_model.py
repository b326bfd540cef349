"""A critic as a Hugging Face model: a language model with a value in the place of the vocabulary.

transformers and vLLM call it a sequence classifier with one label. That is read from the last
token; here every token has its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megadapo.models.description import ModelDescription, describe_model
from megadapo.models.families.rows import VALUE_HEAD

_LANGUAGE_MODEL, _VALUE_MODEL = "ForCausalLM", "ForSequenceClassification"


def describe_critic(hf_config: Mapping[str, Any]) -> ModelDescription:
    """What becomes of a language model, or of a critic's own folder, as a critic.

    Raises:
        WeightError: the family is not known, or a size is missing; it names the key.
    """
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
    """The config.json of a critic that began as the model of `hf_config`."""
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
