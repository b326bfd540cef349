"""What a trainer rank takes during an update, beside what it holds all the time."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.lab.plan.activations import (
    LayerWidths,
    backward_extra,
    kept_by_chunk,
    kept_by_layer,
    layer_widths,
)
from megadapo.lab.plan.head import HeadBytes, head_bytes
from megadapo.lab.plan.ranks import RankKind
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.layout import padded_vocab_size

TOKEN_BYTES = 42
"""Of a token in a micro-batch: two int64 ids, its row, three fp32 values of the loss, two marks."""
OWN_LAYER_BYTES = 16
"""And, where our own layers compute, two int64 places in the padded batch."""
LOGPROB_BYTES = 8
"""An old log-prob and the one that it is held against, kept for a whole step."""


@dataclass(frozen=True, kw_only=True)
class UpdateLoad:
    """How much a rank computes."""

    tokens_per_micro_batch: int
    num_micro_batches: int
    """Of one mini-batch."""
    num_step_tokens: int
    """Of all mini-batches."""


@dataclass(frozen=True, kw_only=True)
class UpdateBytes:
    """At the worst moment of an update."""

    inputs: int
    activations: int
    """Kept for the backward pass, of all micro-batches in flight."""
    layer: int
    """Beside them, while one layer goes back."""
    head: int
    """Beside them, while the policy head computes; 0 where there is none."""

    @property
    def working(self) -> int:
        """Head and layers take turns."""
        return max(self.layer, self.head)

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
    fused: bool,
) -> UpdateBytes:
    """Largest amounts of an update.

    Args:
        itemsize: bytes of an element of weights and activations.
        fused: whether Transformer Engine's layers compute, or our own.
    """
    widths = layer_widths(model, trainer, itemsize=itemsize, fused=fused)
    tokens = load.tokens_per_micro_batch // trainer.context_parallel
    kept = kept_by_layer(widths)
    chunks = [kept_by_chunk(kept, trainer, size) for size in kind.chunk_layers]
    in_flight = chunks_in_flight(kind, load.num_micro_batches)
    # the pipeline's schedule keeps what each chunk sent on
    sent = widths.residual * itemsize if kind.num_stages > 1 else 0.0
    per_chunk = sum(chunks) / len(chunks) + sent
    activations = in_flight * per_chunk * tokens
    if kind.has_head:
        activations -= sent * tokens
    layer = backward_extra(widths, trainer, num_layers=kind.chunk_layers[-1], num_tokens=tokens)
    return UpdateBytes(
        inputs=_input_bytes(widths, model, trainer, load) // trainer.context_parallel,
        activations=int(activations + _gather_buffer(widths) * tokens),
        layer=int(layer),
        head=_head(model, trainer, kind, widths, tokens).total if kind.has_head else 0,
    )


def chunks_in_flight(kind: RankKind, num_micro_batches: int) -> int:
    """Most passes of a micro-batch through a chunk that wait for their backward pass (1F1B)."""
    behind = kind.num_stages - kind.stage - 1
    num_chunks = len(kind.chunk_layers)
    warmup = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * kind.num_stages
    return min(warmup + 1, num_micro_batches * num_chunks)


def _input_bytes(
    widths: LayerWidths, model: ModelDescription, trainer: TrainerConfig, load: UpdateLoad
) -> int:
    """A mini-batch's micro-batches are on the device together, a step's log-probs all the time."""
    per_token = TOKEN_BYTES
    if not widths.fused:
        # cosine and sine of half of a head's angles each
        per_token += OWN_LAYER_BYTES + model.shape.head_dim * 4
    if trainer.router_replay:
        per_token += model.experts_per_token * (1 if model.shape.num_experts <= 256 else 4)
    num_tokens = load.num_micro_batches * load.tokens_per_micro_batch
    return num_tokens * per_token + load.num_step_tokens * LOGPROB_BYTES


def _gather_buffer(widths: LayerWidths) -> float:
    """megatron-core's own layers gather a part's input into one buffer that they keep."""
    return 0.0 if widths.fused else widths.gathered * widths.itemsize


def _head(
    model: ModelDescription,
    trainer: TrainerConfig,
    kind: RankKind,
    widths: LayerWidths,
    num_tokens: int,
) -> HeadBytes:
    tp = trainer.tensor_parallel
    padded = padded_vocab_size(model.shape.vocab_size, tp)
    return head_bytes(widths, padded_vocab=padded, tp=tp, num_tokens=num_tokens)
