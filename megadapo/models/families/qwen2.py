"""Qwen2 and Qwen2.5: a bias on q, k and v, and nowhere else."""

from megadapo.models.families.family import Family
from megadapo.models.families.rows import (
    ATTENTION_OUT,
    DOWN,
    GATE_UP,
    INPUT_NORM,
    MLP_NORM,
    QKV,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    layer=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, MLP_NORM, GATE_UP, DOWN),
    attention_bias=True,
)
