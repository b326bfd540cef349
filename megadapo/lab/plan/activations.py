"""What a decoder layer keeps for its backward pass, and what it takes beside that.

A list of tensors, not a fit: each term names what autograd holds. Bytes per token of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ExpertWidths:
    """A layer of experts on one rank, with tokens spread evenly over them."""

    copies: float
    """Of each token that the rank has, in the experts that it has."""
    ffn: float
    """Of one expert, in elements."""
    num_experts: int
    """Of the whole layer, which the router scores."""
    num_local: int
    """Of them on this rank."""


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """How wide a layer's tensors are on one rank, in elements a token."""

    hidden: float
    residual: float
    """Between the parts of a layer; with sequence parallelism each rank has its part of it."""
    query: float
    key: float
    """Of the keys, and as much again of the values."""
    ffn: float
    num_heads: float
    num_kv_heads: float
    context: int
    """Context-parallel ranks, whose keys and values each of them needs."""
    experts: ExpertWidths | None
    """In the place of one MLP."""
    has_qk_norm: bool
    itemsize: int
    fused: bool
    """Transformer Engine's layers with fused attention, as on every GPU; else our own."""

    @property
    def gathered(self) -> float:
        """A copy of the whole residual, where a rank has only a part."""
        return self.hidden if self.residual < self.hidden else 0.0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes a token that one layer keeps, by what it keeps them for."""

    layer_input: float
    """The residual that enters: read by the first norm, and all that full recomputation keeps."""
    attention_inputs: float
    """The normed residual, which q, k and v are made of."""
    attention: float
    """q, k and v as attention reads them, their norms' inputs, its output and statistics."""
    mlp_inputs: float
    """The residual between the parts, and it normed."""
    mlp: float
    """Gate and up beside each other, and their product."""
    unrotated: float
    """What core_attn's recomputation keeps in the place of `attention`."""

    @property
    def whole(self) -> float:
        return (
            self.layer_input + self.attention_inputs + self.attention + self.mlp_inputs + self.mlp
        )


def layer_widths(
    model: ModelDescription, trainer: TrainerConfig, *, itemsize: int, fused: bool
) -> LayerWidths:
    """Widths of the tensors on one of the tensor-parallel ranks."""
    shape, tp = model.shape, trainer.tensor_parallel
    return LayerWidths(
        hidden=shape.hidden_size,
        residual=shape.hidden_size / (tp if trainer.sequence_parallel else 1),
        query=shape.num_heads * shape.head_dim / tp,
        key=shape.num_kv_heads * shape.head_dim / tp,
        ffn=shape.ffn_size / tp,
        num_heads=shape.num_heads / tp,
        num_kv_heads=shape.num_kv_heads / tp,
        context=trainer.context_parallel,
        experts=expert_widths(model, trainer),
        has_qk_norm=model.family.has_qk_norm,
        itemsize=itemsize,
        fused=fused,
    )


def expert_widths(model: ModelDescription, trainer: TrainerConfig) -> ExpertWidths | None:
    """None for a model without experts."""
    if model.routing is None:
        return None
    shape, etp = model.shape, trainer.expert_tensor_parallel
    # tensor-parallel ranks route their own tokens each, which those that share an expert gather
    share = trainer.tensor_parallel if trainer.sequence_parallel else 1
    return ExpertWidths(
        copies=model.routing.experts_per_token * etp / share,
        ffn=shape.expert_ffn_size / etp,
        num_experts=shape.num_experts,
        num_local=shape.num_experts // trainer.expert_parallel,
    )


def kept_by_layer(widths: LayerWidths) -> Kept:
    """What is kept where nothing is recomputed."""
    size = widths.itemsize
    statistic = FP32_BYTES * widths.residual / widths.hidden
    qkv = widths.query + 2 * widths.key
    # our own attention computes whole sequences, gaps included, and takes its own rows out again
    whole = 1 if widths.fused else widths.context
    outputs = widths.query * (1 if widths.fused else whole + 1)
    core = (whole * qkv + outputs) * size + whole * widths.num_heads * FP32_BYTES
    if widths.has_qk_norm:
        normed_heads = widths.num_heads + widths.num_kv_heads
        core += (widths.query + widths.key) * size + normed_heads * FP32_BYTES
    return Kept(
        layer_input=widths.residual * size + statistic,
        attention_inputs=widths.residual * size,
        attention=core,
        mlp_inputs=2 * widths.residual * size + statistic,
        mlp=3 * widths.ffn * size if widths.experts is None else kept_by_experts(widths),
        # keys and values are views of the whole product, queries a copy; the output is the
        # projection's input
        unrotated=core - (whole * qkv + outputs) * size + (widths.query * 2 + qkv) * size,
    )


def kept_by_choice(kept: Kept, trainer: TrainerConfig) -> float:
    """What a layer keeps that `trainer.recompute` applies to."""
    if trainer.recompute == "full":
        return kept.layer_input
    total = kept.whole
    if trainer.recompute == "selective":
        if "mlp" in trainer.recompute_modules:
            total -= kept.mlp
        if "core_attn" in trainer.recompute_modules:
            total += kept.unrotated - kept.attention
    return total


def kept_by_chunk(kept: Kept, trainer: TrainerConfig, num_layers: int) -> float:
    """What one chunk of layers keeps of a micro-batch."""
    chosen = num_layers
    if trainer.recompute == "full" and trainer.recompute_layers:
        chosen = min(trainer.recompute_layers, num_layers)
    return chosen * kept_by_choice(kept, trainer) + (num_layers - chosen) * kept.whole


def backward_extra(
    widths: LayerWidths, trainer: TrainerConfig, *, num_layers: int, num_tokens: int
) -> float:
    """Bytes beyond all that is kept, at the worst moment of the first layer to go back.

    That is the last layer of a chunk: all the others' tensors are still there.
    """
    kept = kept_by_layer(widths)
    recomputed = kept.whole - kept_by_choice(kept, trainer)
    if trainer.recompute == "full" and 0 < trainer.recompute_layers < num_layers:
        recomputed = 0.0  # the last layer is none of those
    is_selective = trainer.recompute == "selective"
    of_mlp = recomputed
    if is_selective:
        of_mlp = kept.mlp if "mlp" in trainer.recompute_modules else 0.0
    of_attention = recomputed - kept.mlp - kept.mlp_inputs
    if is_selective:
        of_attention = -kept.mlp_inputs - (0.0 if of_mlp else kept.mlp)
        if "core_attn" in trainer.recompute_modules:
            of_attention += kept.attention
    return max(
        of_mlp * num_tokens + _mlp_backward(widths, num_tokens),
        of_attention * num_tokens + _attention_backward(widths) * num_tokens,
    )


def _mlp_backward(widths: LayerWidths, num_tokens: int) -> float:
    """While the gradient goes through the second product, through the gate, through the first."""
    if widths.experts is not None:
        return experts_backward(widths, num_tokens)
    size, ffn = widths.itemsize, widths.ffn
    gradient = widths.residual * size
    weight = widths.hidden * ffn * size
    second = (gradient + (widths.gathered + ffn) * size) * num_tokens + weight
    # the gradient of the product takes the place of the product
    gate = (gradient + 2 * ffn * size + _gate_scratch(widths)) * num_tokens
    # gate, up and their product are gone by then
    first = gradient + (2 * ffn - 3 * ffn + widths.gathered + widths.hidden) * size
    return max(second, gate, first * num_tokens + 2 * weight)


def kept_by_experts(widths: LayerWidths) -> float:
    """The tokens as experts read them, gate and up, their product, and that times its weight.

    Beside that what the router says of every expert: scores and probabilities in fp32, a choice.
    """
    experts = widths.experts
    assert experts is not None
    # a fused kernel weights the product while it makes it
    products = 3 if widths.fused else 4
    copies = experts.copies * (widths.hidden + products * experts.ffn) * widths.itemsize
    router = experts.num_experts * (3 * FP32_BYTES + 1) * widths.residual / widths.hidden
    return copies + router


def experts_backward(widths: LayerWidths, num_tokens: int) -> float:
    """Gradients of what experts return, read and make between, of all of a rank's at once."""
    experts, size = widths.experts, widths.itemsize
    assert experts is not None
    gradient = (widths.residual + experts.copies * 2 * widths.hidden) * size
    between = experts.copies * 3 * experts.ffn * size
    weights = 3 * experts.ffn * widths.hidden * size
    if not widths.fused:
        # one expert after the other
        between /= experts.num_local
        return (gradient + between) * num_tokens + weights
    return (gradient + between) * num_tokens + weights * experts.num_local


def _gate_scratch(widths: LayerWidths) -> float:
    """None in a fused kernel; ours makes two results in fp32, of what it has widened."""
    if widths.fused:
        return 0.0
    num_copies = 2 if widths.itemsize == FP32_BYTES else 5
    return num_copies * widths.ffn * FP32_BYTES


def _attention_backward(widths: LayerWidths) -> float:
    """The output's gradient and those of q, k and v; fused attention adds up q's in fp32."""
    gradients = (2 * widths.query + 2 * widths.key + widths.residual) * widths.itemsize
    if widths.fused and widths.context > 1:
        # keys and values of two other ranks, one on its way, and their gradients
        gradients += 8 * widths.key * widths.itemsize
    if widths.fused:
        return gradients + widths.query * FP32_BYTES
    # of the padded output as well, and of q, k and v before the padding
    return gradients + widths.context * (2 * widths.query + 2 * widths.key) * widths.itemsize
