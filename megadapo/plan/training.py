"""Memory of a trainer rank during an update, besides its state."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.models.description import ModelDescription
from megadapo.plan.activations import (
    FP32_BYTES,
    Layers,
    LayerWidths,
    backward_extra,
    kept_by_choice,
    kept_by_layer,
    layer_widths,
)
from megadapo.plan.ranks import RankKind
from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.layout import padded_vocab_size

TOKEN_BYTES = 42
"""Bytes per token of a micro-batch: two int64 ids, its row, three fp32 loss values, two flags."""
OWN_LAYER_BYTES = 16
"""Extra bytes per token for our own layers: two int64 indices into the padded batch."""
LOGPROB_BYTES = 8
"""Bytes per token of a step: an old log-prob and the rollout's one."""


@dataclass(frozen=True, kw_only=True)
class UpdateLoad:
    """Number of tokens and micro-batches that a rank computes."""

    tokens_per_micro_batch: int
    num_micro_batches: int
    """Micro-batches per mini-batch."""
    num_step_tokens: int
    """Tokens of all mini-batches."""


@dataclass(frozen=True, kw_only=True)
class UpdateBytes:
    """Peak memory of an update."""

    inputs: int
    activations: int
    """Activations kept for the backward pass, of all micro-batches in flight."""
    working: int
    """Working memory of one layer's backward pass, or of the policy head if that takes more; they
    never run at the same time."""

    @property
    def total(self) -> int:
        return self.inputs + self.activations + self.working


def update_bytes(
    model: ModelDescription,
    trainer: TrainerConfig,
    kind: RankKind,
    load: UpdateLoad,
    *,
    itemsize: int,
    layers: Layers,
) -> UpdateBytes:
    """Return the peak memory of an update.

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
    return UpdateBytes(
        inputs=_input_bytes(widths, model, trainer, load) // trainer.context_parallel,
        activations=int(activations),
        working=max(int(layer), head),
    )


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
