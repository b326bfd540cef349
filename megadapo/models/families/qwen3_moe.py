"""Qwen3 mixture of experts: Qwen3's attention, a router and experts in every layer."""

from megadapo.models.families.family import Family
from megadapo.models.families.qwen3 import ATTENTION
from megadapo.models.families.rows import EXPERT_DOWN, EXPERT_GATE_UP, MLP_NORM, ROUTER

# With experts there is no linear_fc1 beside the norm for Transformer Engine to fuse it into.
FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    layer=(*ATTENTION, MLP_NORM, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN),
)
