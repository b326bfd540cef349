"""Memory of a trainer rank during an update, besides its state.

Most of it is activations of decoder layers: kept for the backward pass, and used during it. Each
term names the tensors that autograd keeps; no constant is fitted. Their units are bytes per token
of one rank, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megadapo.models.description import ModelDescription
from megadapo.plan.ranks import FP32_BYTES, RankKind
from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.layout import padded_vocab_size

Layers = Literal["transformer-engine", "own", "own on a CPU"]
"""Implementation of the layers; the first two are on GPUs, with fused kernels."""
TOKEN_BYTES = 42
"""Bytes per token of a micro-batch: two int64 ids, its row, three fp32 loss values, two flags."""
OWN_LAYER_BYTES = 16
"""Extra bytes per token for our own layers: two int64 indices into the padded batch."""
LOGPROB_BYTES = 8
"""Bytes per token of a step: an old log-prob and the rollout's one."""


@dataclass(frozen=True, kw_only=True)
class ExpertWidths:
    """A layer of experts on one rank, with tokens spread evenly over them."""

    copies: float
    """Copies of each of the rank's tokens in the rank's experts."""
    ffn: float
    """Width of one expert, in elements."""
    num_experts: int
    """Number of experts in the layer; the router scores all of them."""
    num_local: int
    """Number of local experts on this rank."""


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """Widths of a layer's tensors on one rank, in elements per token."""

    hidden: float
    residual: float
    """Width between the parts of a layer; a share of `hidden` with sequence parallelism."""
    query: float
    key: float
    """Width of the keys; the values have the same."""
    ffn: float
    num_heads: float
    num_kv_heads: float
    context: int
    """Number of context-parallel ranks; each needs the keys and values of all."""
    experts: ExpertWidths | None
    """Experts in place of one MLP."""
    has_qk_norm: bool
    itemsize: int
    layers: Layers

    @property
    def is_own(self) -> bool:
        return self.layers != "transformer-engine"

    @property
    def on_gpu(self) -> bool:
        return self.layers != "own on a CPU"

    @property
    def pads(self) -> bool:
        """Whether attention pads its sequences; only our own does."""
        has_packed_kernel = self.on_gpu and self.context == 1 and self.itemsize < FP32_BYTES
        return self.is_own and not has_packed_kernel

    @property
    def gathered(self) -> float:
        """Width of a copy of the whole residual; 0 without sequence parallelism."""
        return self.hidden if self.residual < self.hidden else 0.0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes per token that one layer keeps for its backward pass, by purpose."""

    layer_input: float
    """Input residual, read by the first norm; full recomputation keeps nothing else."""
    attention_inputs: float
    """Normed residual, the input of q, k and v."""
    attention: float
    """Inputs of attention and of its norms, its output and statistics."""
    mlp_inputs: float
    """Residual between the parts, before and after its norm."""
    mlp: float
    """Gate and up projections, and their product."""
    unrotated: float
    """Tensors that replace `attention` if core_attn is recomputed."""

    @property
    def whole(self) -> float:
        return (
            self.layer_input + self.attention_inputs + self.attention + self.mlp_inputs + self.mlp
        )


def layer_widths(
    model: ModelDescription, trainer: TrainerConfig, *, itemsize: int, layers: Layers
) -> LayerWidths:
    """Return the widths of the tensors on one tensor-parallel rank."""
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
        experts=_expert_widths(model, trainer),
        has_qk_norm=model.family.has_qk_norm,
        itemsize=itemsize,
        layers=layers,
    )


def _expert_widths(model: ModelDescription, trainer: TrainerConfig) -> ExpertWidths | None:
    if model.routing is None:
        return None
    shape, etp = model.shape, trainer.expert_tensor_parallel
    # with sequence parallelism each rank routes its own tokens; ranks that share an expert gather
    share = trainer.tensor_parallel if trainer.sequence_parallel else 1
    return ExpertWidths(
        copies=model.routing.experts_per_token * etp / share,
        ffn=shape.expert_ffn_size / etp,
        num_experts=shape.num_experts,
        num_local=shape.num_experts // trainer.expert_parallel,
    )


def kept_by_layer(widths: LayerWidths) -> Kept:
    """Return the kept bytes without recomputation."""
    size = widths.itemsize
    statistic = FP32_BYTES * widths.residual / widths.hidden
    qkv = widths.query + 2 * widths.key
    # padded attention computes whole sequences, and extracts its own rows afterwards
    whole = widths.context if widths.pads else 1
    outputs = widths.query * (whole + 1 if widths.pads else 1)
    core = (whole * qkv + outputs) * size + whole * widths.num_heads * FP32_BYTES
    if widths.has_qk_norm:
        normed_heads = widths.num_heads + widths.num_kv_heads
        core += (widths.query + widths.key) * size + normed_heads * FP32_BYTES
    return Kept(
        layer_input=widths.residual * size + statistic,
        attention_inputs=widths.residual * size,
        attention=core,
        mlp_inputs=2 * widths.residual * size + statistic,
        mlp=_kept_by_mlp(widths),
        # keys and values are views of the whole product, queries a copy; the output is the
        # projection's input
        unrotated=core - (whole * qkv + outputs) * size + (widths.query * 2 + qkv) * size,
    )


def _kept_by_mlp(widths: LayerWidths) -> float:
    """Return the kept bytes of an MLP, or of experts: inputs, gate and up, product, weighted
    product.

    The router adds scores and probabilities in fp32 and a choice for every expert.
    """
    experts = widths.experts
    if experts is None:
        return 3 * widths.ffn * widths.itemsize
    # a fused kernel applies the weight while it computes the product
    products = 4 if widths.is_own else 3
    copies = experts.copies * (widths.hidden + products * experts.ffn) * widths.itemsize
    router = experts.num_experts * (3 * FP32_BYTES + 1) * widths.residual / widths.hidden
    return copies + router


def kept_by_choice(kept: Kept, trainer: TrainerConfig) -> float:
    """Return the kept bytes of a layer to which `trainer.recompute` applies."""
    if trainer.recompute == "full":
        return kept.layer_input
    total = kept.whole
    if "mlp" in trainer.recompute:
        total -= kept.mlp
    if "core_attn" in trainer.recompute:
        total += kept.unrotated - kept.attention
    return total


def backward_extra(widths: LayerWidths, trainer: TrainerConfig, *, num_tokens: int) -> float:
    """Return the peak bytes beyond all kept tensors during the first layer's backward pass.

    That is the last layer of a chunk: the tensors of all other layers still exist.
    """
    kept = kept_by_layer(widths)
    if trainer.recompute == "full":
        of_mlp = kept.whole - kept_by_choice(kept, trainer)
        of_attention = of_mlp - kept.mlp - kept.mlp_inputs
    else:
        of_mlp = kept.mlp if "mlp" in trainer.recompute else 0.0
        of_attention = -kept.mlp_inputs - (0.0 if of_mlp else kept.mlp)
        if "core_attn" in trainer.recompute:
            of_attention += kept.attention
    return max(
        of_mlp * num_tokens + _mlp_backward(widths, num_tokens),
        of_attention * num_tokens + _attention_backward(widths) * num_tokens,
    )


def _mlp_backward(widths: LayerWidths, num_tokens: int) -> float:
    """Return the peak bytes of the MLP's backward pass: second product, gate, or first product."""
    if widths.experts is not None:
        return _experts_backward(widths, widths.experts, num_tokens)
    size, ffn = widths.itemsize, widths.ffn
    gradient = widths.residual * size
    weight = widths.hidden * ffn * size
    second = (gradient + (widths.gathered + ffn) * size) * num_tokens + weight
    # our gate on a CPU makes two results in fp32, from widened inputs
    num_copies = 2 if size == FP32_BYTES else 5
    scratch = 0.0 if widths.on_gpu else num_copies * ffn * FP32_BYTES
    # the gradient of the product replaces the product
    gate = (gradient + 2 * ffn * size + scratch) * num_tokens
    # gate, up and their product are free by then
    first = gradient + (2 * ffn - 3 * ffn + widths.gathered + widths.hidden) * size
    return max(second, gate, first * num_tokens + 2 * weight)


def _experts_backward(widths: LayerWidths, experts: ExpertWidths, num_tokens: int) -> float:
    """Return the bytes of the gradients of experts' outputs, inputs and intermediate tensors."""
    size = widths.itemsize
    gradient = (widths.residual + experts.copies * 2 * widths.hidden) * size
    between = experts.copies * 3 * experts.ffn * size
    weights = 3 * experts.ffn * widths.hidden * size
    if not widths.is_own:
        return (gradient + between) * num_tokens + weights * experts.num_local
    # one expert at a time
    return (gradient + between / experts.num_local) * num_tokens + weights


def _attention_backward(widths: LayerWidths) -> float:
    """Return the bytes of the gradients of the output and of q, k and v."""
    gradients = (2 * widths.query + 2 * widths.key + widths.residual) * widths.itemsize
    if not widths.is_own and widths.context > 1:
        # keys and values of two other ranks, one of them in transit, and their gradients
        gradients += 8 * widths.key * widths.itemsize
    if not widths.pads:
        # it accumulates q's gradient in fp32
        return gradients + widths.query * FP32_BYTES
    # also the padded output, and q, k and v before the padding
    return gradients + widths.context * (2 * widths.query + 2 * widths.key) * widths.itemsize


@dataclass(frozen=True, kw_only=True)
class UpdateLoad:
    """Number of tokens and micro-batches that a rank computes."""

    tokens_per_micro_batch: int
    num_micro_batches: int
    """Micro-batches per mini-batch."""
    num_step_tokens: int
    """Tokens of all mini-batches."""


def update_bytes(
    model: ModelDescription,
    trainer: TrainerConfig,
    kind: RankKind,
    load: UpdateLoad,
    *,
    itemsize: int,
    layers: Layers,
) -> dict[str, int]:
    """Return the peak memory of an update by purpose.

    Args:
        itemsize: bytes of an element of weights and activations.
    """
    widths = layer_widths(model, trainer, itemsize=itemsize, layers=layers)
    tokens = load.tokens_per_micro_batch // trainer.context_parallel
    kept = kept_by_layer(widths)
    chunks = [size * kept_by_choice(kept, trainer) for size in kind.chunk_layers]
    in_flight = chunks_in_flight(kind, load.num_micro_batches)
    # the pipeline's schedule keeps each chunk's output
    sent = widths.residual * itemsize if kind.num_stages > 1 else 0.0
    per_chunk = sum(chunks) / len(chunks) + sent
    activations = in_flight * per_chunk * tokens
    if kind.has_head:
        activations -= sent * tokens
    if widths.is_own:
        # megatron-core's own layers gather a part's input into one buffer that they keep
        activations += widths.gathered * itemsize * tokens
    layer = backward_extra(widths, trainer, num_tokens=tokens)
    head = _head_bytes(model, trainer, widths, tokens) if kind.has_head else 0
    return {
        "micro-batches": _input_bytes(widths, model, trainer, load) // trainer.context_parallel,
        # kept for the backward pass, of all micro-batches in flight
        "activations": int(activations),
        # they never run at the same time
        "one layer's backward, or the head": max(int(layer), head),
    }


def chunks_in_flight(kind: RankKind, num_micro_batches: int) -> int:
    """Return the most forward passes through a chunk that await their backward pass (1F1B)."""
    behind = kind.num_stages - kind.stage - 1
    num_chunks = len(kind.chunk_layers)
    warmup = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * kind.num_stages
    return min(warmup + 1, num_micro_batches * num_chunks)


def _input_bytes(
    widths: LayerWidths, model: ModelDescription, trainer: TrainerConfig, load: UpdateLoad
) -> int:
    """Return the bytes of a mini-batch's micro-batches and of a step's log-probs."""
    per_token = TOKEN_BYTES
    if widths.is_own:
        # cosine and sine of half of a head's angles each
        per_token += OWN_LAYER_BYTES + model.shape.head_dim * 4
    if trainer.router_replay:
        per_token += model.expert_choices_per_token * (1 if model.shape.num_experts <= 256 else 4)
    num_tokens = load.num_micro_batches * load.tokens_per_micro_batch
    return num_tokens * per_token + load.num_step_tokens * LOGPROB_BYTES


def _head_bytes(
    model: ModelDescription, trainer: TrainerConfig, widths: LayerWidths, num_tokens: int
) -> int:
    """Return the policy head's working memory in its own tiling, with every token predicted."""
    import torch

    from megadapo.kernels.policy_head.tiling import plan_tiling

    tp = trainer.tensor_parallel
    padded_vocab = padded_vocab_size(model.shape.vocab_size, tp)
    dtype = torch.float32 if widths.itemsize == FP32_BYTES else torch.bfloat16
    device = torch.device("cuda" if widths.on_gpu else "cpu")
    tiling = plan_tiling(padded_vocab, model.shape.hidden_size, dtype, device)
    columns, size = padded_vocab // tp, widths.itemsize
    block = min(tiling.block_rows, num_tokens)
    num_blocks = -(-num_tokens // tiling.block_rows)
    # reused buffers: a block's gradient of the logits, and a tile's logits
    logits = 0 if size == FP32_BYTES else min(tiling.tile_rows, block) * columns * FP32_BYTES
    buffers = block * columns * size + logits
    residual = num_tokens * widths.residual * size
    # gradients of the output weight's local rows, and of the hidden states: first the predicted
    # rows, then all
    weight = columns * widths.hidden * (FP32_BYTES if num_blocks > 1 else size)
    if widths.on_gpu:
        # main_grad has it; autograd gets a tensor in its place, when the buffers are free again
        buffers, weight = max(buffers, int(columns * widths.hidden * size)), 0
    gradients = int(weight + 2 * residual)
    # hidden states before and after the last norm, and gathered blocks: with sequence parallelism
    # the next block is already in transit
    num_fetched = min(num_blocks, 2) if widths.gathered else 1
    rows = int(2 * residual + num_fetched * block * widths.hidden * size)
    return buffers + gradients + rows
