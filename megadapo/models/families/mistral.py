"""Mistral: no bias anywhere."""

from megadapo.models.families.family import Family
from megadapo.models.families.rows import (
    ATTENTION_OUT,
    DOWN,
    GATE_UP,
    INPUT_NORM,
    MLP_NORM,
    QKV,
)

FAMILY = Family(
    architecture="MistralForCausalLM",
    layer=(INPUT_NORM, QKV, ATTENTION_OUT, MLP_NORM, GATE_UP, DOWN),
    attention_bias=False,
)
