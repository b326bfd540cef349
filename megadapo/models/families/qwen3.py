"""Qwen3, dense: a norm on each head's q and k, attention bias as the configuration says."""

from megadapo.models.families.family import Family
from megadapo.models.families.rows import (
    ATTENTION_OUT,
    ATTENTION_OUT_BIAS,
    DOWN,
    GATE_UP,
    INPUT_NORM,
    K_NORM,
    MLP_NORM,
    Q_NORM,
    QKV,
    QKV_BIAS,
)

ATTENTION = (INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, ATTENTION_OUT, ATTENTION_OUT_BIAS)

FAMILY = Family(architecture="Qwen3ForCausalLM", layer=(*ATTENTION, MLP_NORM, GATE_UP, DOWN))
