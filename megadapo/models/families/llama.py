"""Llama 3: attention and MLP biases as the configuration says (published models have none)."""

from megadapo.models.families.family import Family
from megadapo.models.families.rows import (
    ATTENTION_OUT,
    ATTENTION_OUT_BIAS,
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    INPUT_NORM,
    MLP_NORM,
    QKV,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="LlamaForCausalLM",
    layer=(
        INPUT_NORM,
        QKV,
        QKV_BIAS,
        ATTENTION_OUT,
        ATTENTION_OUT_BIAS,
        MLP_NORM,
        GATE_UP,
        GATE_UP_BIAS,
        DOWN,
        DOWN_BIAS,
    ),
)
