"""Sequences of one forward pass, as the tensors that the model and its head read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megadapo.algorithm.importance import (
    ImportanceConfig,
    bounded_weights,
    importance_ratios,
    is_outside,
)
from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.trainer.batch.packing import (
    WHOLE_SEQUENCES,
    ContextPart,
    PackedSequences,
    pack_sequences,
    tensors_on,
)
from megadapo.trainer.model.parallel import add_up_over_context


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """T tokens of S packed sequences, R of which are predicted by the policy head.

    The fields have four index spaces:

    - [T]: this rank's tokens with padding. Entry t belongs to hidden state t and describes the next
      token, which may be on another context-parallel rank. Entries outside of `rows` are not used.
    - [S]: the sequences.
    - [R]: the tokens that this rank predicts. `rows` maps them to T, `batch_index` to the batch.
    - [N]: the predicted tokens of all context-parallel ranks. `own_of_all_ranks` maps R to N.

    Fields from `has_computed_advantages` on are computed in the step, on the last pipeline stage
    only.
    """

    tokens: Tensor  # [1, T] int64
    is_uncounted: Tensor  # [T] bool, tokens that routers do not balance, such as padding
    packed: PackedSequences
    members: np.ndarray  # [S] int64, indices of the sequences in the batch
    lengths: np.ndarray  # [S] int64, their tokens
    batch_index: np.ndarray  # [R] index in the flat arrays of the batch
    rows: Tensor  # [R] int64, ascending: hidden states that predict a token
    targets: Tensor  # [T] int64
    advantages: Tensor  # [T] fp32
    loss_weights: Tensor  # [T] fp32
    logprobs_rollout: Tensor  # [R] fp32
    is_current: Tensor  # [R] bool, sampled from the current weights
    is_stale: Tensor  # [R] bool, sampled from other weights
    num_stale: int
    num_tokens: int
    """T without padding."""
    sequences_all_ranks: np.ndarray
    """[N] int64, ascending: index among the S sequences of each predicted token."""
    own_of_all_ranks: np.ndarray  # [R] index among the N, ascending
    has_stale: bool
    """Whether a predicted token on any context-parallel rank was sampled from other weights."""
    experts: Tensor | None = None  # [T, layers, K], with router replay
    """Experts of each token. The engine has none for the last tokens of a sequence, which it never
    read; they get those of the last token that it read."""
    has_computed_advantages: bool = False
    """Whether the trainer computed the advantages; the batch's are finite, and these may be NaN."""
    proximal: Tensor | None = None
    """The trainer's log-probs [T] fp32 before the step's first update."""
    logprobs_old: Tensor | None = None
    """Log-probs [T] in the ratio's denominator: `proximal`, or the engine's for stale tokens."""
    importance_weights: Tensor | None = None
    """Weights [T] fp32, 1 for other tokens; None if no token is weighted."""
    num_weighted: int = 0
    num_outside: float = 0.0
    """Number of weighted tokens whose ratio is out of bounds."""
    logprobs_ref: Tensor | None = None
    """Reference log-probs [T] fp32 for the loss; None if the loss has no KL divergence."""
    kl: Tensor | None = None
    """Estimated KL divergence [R] float64 of each predicted token before the step's first update;
    None without a reference."""
    values_old: Tensor | None = None
    """The critic's values [R] fp32 before the step's first update; None without a critic."""
    returns: Tensor | None = None
    """The critic's targets [R] fp32, like `values_old`."""
    is_chosen: Tensor | None = None
    """Tokens [T] that gate "clip_cov" or "kl_cov" chose for the next update: 1, others 0, fp32."""
    logprobs_update: Tensor | None = None
    """Log-probs [T] fp32 in the first update on the micro-batch; None before."""

    @property
    def sequences(self) -> np.ndarray:
        """[R] int64: index among the S sequences of each predicted token."""
        own: np.ndarray = self.sequences_all_ranks[self.own_of_all_ranks]
        return own

    def at_rows(self, values: np.ndarray) -> Tensor:
        """Return [T] fp32 with `values` [R] at the rows of the predicted tokens, 0 elsewhere."""
        spread = torch.zeros_like(self.advantages)
        spread[self.rows] = torch.from_numpy(values).to(spread)
        return spread

    def with_advantages(self, values: np.ndarray) -> MicroBatch:
        """Return a copy with computed advantages [R] of the predicted tokens."""
        return replace(self, advantages=self.at_rows(values), has_computed_advantages=True)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every tensor on the device; itself if they are there."""
        if self.tokens.device == device:
            return self
        return replace(self, packed=self.packed.to(device), **tensors_on(self, device))


_NAMES = [field.name for field in fields(MicroBatch)]
POLICY_FIELDS = ("advantages", *_NAMES[_NAMES.index("has_computed_advantages") :])
"""Fields of a micro-batch that the trainer computes for the step; their tensors stay on the device
while the others wait in main memory."""


def build_micro_batch(
    batch: PackedBatch,
    members: np.ndarray,
    *,
    predicted: np.ndarray,
    policy_version: int | None,
    inverse_frequencies: Tensor | None,
    token_multiple: int,
    part: ContextPart = WHOLE_SEQUENCES,
    takes_experts: bool = False,
) -> MicroBatch:
    """Pack the given sequences in this order, in main memory; without any, pack only padding.

    Args:
        predicted: [tokens of the batch] bool, tokens that the head predicts.
        policy_version: of the current weights; None if stale tokens need not be known.
        inverse_frequencies: [D / 2] of the rotary embedding, for our own layers.
        token_multiple: T is padded to a multiple of it, for sequence parallelism.
        takes_experts: whether the micro-batch gets the experts of its tokens.
    """
    starts, stops = batch.cu_seqlens[members], batch.cu_seqlens[members + 1]
    source = _concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)])
    padded, row_of = _lay_out(stops - starts, part, token_multiple)
    num_rows = sum(padded) // part.size
    here = np.flatnonzero(row_of >= 0)
    chosen = np.flatnonzero(predicted[source])
    own = np.flatnonzero(row_of[chosen - 1] >= 0)
    rows, of_rows = row_of[chosen[own] - 1], source[chosen[own]]
    versions = batch.policy_versions[source[chosen]]
    is_current = versions == policy_version
    is_stale = (versions != NO_VERSION) & ~is_current & (policy_version is not None)
    has_experts = takes_experts and len(batch.experts) > 0
    return MicroBatch(
        tokens=_spread(batch.tokens[source[here]], row_of[here], num_rows)[None, :],
        is_uncounted=~_spread(np.ones(len(here), dtype=np.bool_), row_of[here], num_rows),
        packed=pack_sequences(padded, inverse_frequencies, part),
        members=members,
        lengths=stops - starts,
        batch_index=of_rows,
        rows=_tensor(rows),
        targets=_spread(batch.tokens[of_rows], rows, num_rows),
        advantages=_spread(batch.advantages[of_rows], rows, num_rows),
        loss_weights=_spread(batch.loss_weights[of_rows], rows, num_rows),
        logprobs_rollout=_tensor(batch.logprobs_rollout[of_rows]),
        is_current=_tensor(is_current[own]),
        is_stale=_tensor(is_stale[own]),
        num_stale=int(is_stale[own].sum()),
        num_tokens=len(here),
        sequences_all_ranks=np.repeat(np.arange(len(members)), stops - starts)[chosen],
        own_of_all_ranks=own,
        has_stale=bool(is_stale.any()),
        experts=_experts(batch, members, row_of, num_rows=num_rows) if has_experts else None,
    )


def _experts(
    batch: PackedBatch, members: np.ndarray, row_of: np.ndarray, *, num_rows: int
) -> Tensor:
    """Return [T, layers, K] in the tokens' rows; padding goes to the first K experts."""
    _, num_layers, per_token = batch.experts[0].shape
    # torch has no arithmetic on uint16
    dtype = np.uint8 if batch.experts[0].dtype == np.uint8 else np.int32
    spread = np.broadcast_to(
        np.arange(per_token, dtype=dtype), (num_rows, num_layers, per_token)
    ).copy()
    first = 0
    for member in members:
        known = batch.experts[member]
        length = int(batch.cu_seqlens[member + 1] - batch.cu_seqlens[member])
        rows = row_of[first : first + length]
        here = np.flatnonzero(rows >= 0)
        spread[rows[here]] = known[np.minimum(here, len(known) - 1)]
        first += length
    return _tensor(spread)


def _lay_out(
    lengths: np.ndarray, part: ContextPart, token_multiple: int
) -> tuple[list[int], np.ndarray]:
    """Return padded lengths, and each token's row on this rank (-1: on another rank).

    Each length is padded so that context parallelism can divide it. A last sequence of padding
    alone fills T up to the multiple.
    """
    chunks = part.chunks_per_sequence
    padded = (-(-lengths // chunks) * chunks).tolist()
    multiple = math.lcm(token_multiple, chunks // part.size)
    padding = -sum(padded) // part.size % multiple if padded else multiple
    if padding:
        padded.append(padding * part.size)
    places = part.places(padded)
    rows = np.full(sum(padded), -1)
    rows[places] = np.arange(len(places))
    firsts = np.cumsum(padded) - padded
    pieces = [rows[first : first + n] for first, n in zip(firsts, lengths, strict=False)]
    return padded, _concatenate(pieces)


def old_policy(
    micro_batch: MicroBatch, proximal: Tensor, importance: ImportanceConfig
) -> MicroBatch:
    """Return the micro-batch with its old policy, given the trainer's log-probs [T].

    It is collective over context-parallel ranks, each of which has some tokens of every sequence.
    If only stale tokens are weighted and no token is stale, these log-probs are the old policy.
    """
    logprobs, stale = proximal, micro_batch.is_stale
    if importance.stale_logprobs == "rollout" and micro_batch.num_stale > 0:
        logprobs = proximal.clone()
        logprobs[micro_batch.rows[stale]] = micro_batch.logprobs_rollout[stale]
    weighted = _weighted_tokens(micro_batch, importance)
    if weighted is None:
        return replace(micro_batch, proximal=proximal, logprobs_old=logprobs)
    rows = micro_batch.rows[weighted]
    ratios = importance_ratios(
        proximal[rows],
        micro_batch.logprobs_rollout[weighted],
        torch.from_numpy(micro_batch.sequences).to(rows.device)[weighted],
        num_sequences=len(micro_batch.members),
        level=importance.level,
        add_up=add_up_over_context,
    )
    weights = torch.ones_like(proximal)
    weights[rows] = bounded_weights(ratios, importance)
    return replace(
        micro_batch,
        proximal=proximal,
        logprobs_old=logprobs,
        importance_weights=weights,
        num_weighted=len(weighted),
        num_outside=is_outside(ratios, importance).sum().item(),
    )


def _weighted_tokens(micro_batch: MicroBatch, importance: ImportanceConfig) -> Tensor | None:
    """Return indices of the weighted tokens among the R predicted; None skips the weighting."""
    recomputes = importance.stale_logprobs == "recompute"
    if importance.scope == "all":
        fresh = micro_batch.is_current
        return torch.nonzero(fresh | micro_batch.is_stale if recomputes else fresh).squeeze(1)
    # over all context-parallel ranks, as all of them must take the same branch
    if recomputes and micro_batch.has_stale:
        return torch.nonzero(micro_batch.is_stale).squeeze(1)
    return None


def _spread(values: np.ndarray, rows: np.ndarray, num_rows: int) -> Tensor:
    """Return the values in the given rows, 0 in the others."""
    spread = np.zeros(num_rows, dtype=values.dtype)
    spread[rows] = values
    return torch.from_numpy(spread)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _concatenate(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
