"""Sequences of one forward pass, as the tensors that the model and its head read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.trainer.batch.packing import (
    ALL,
    ContextPart,
    PackedSequences,
    pack_sequences,
    tensors_on,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeSequences:
    """The N predicted tokens of a micro-batch's sequences, on all context-parallel ranks.

    All fields but `own` are the same on these ranks.
    """

    sequences: np.ndarray  # [N] int64, index among the S sequences of each token's, ascending
    own: np.ndarray  # [R] indices of the tokens that this rank predicts, ascending
    is_current: np.ndarray  # [N] bool, sampled from the current weights
    has_stale: bool
    """Whether some tokens were sampled from other weights."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """T tokens of S packed sequences, R of which are predicted by the policy head.

    Entry t of a [T] tensor belongs to hidden state t and describes the next token, which may be on
    another context-parallel rank. Entries outside of `rows` are not used.
    """

    tokens: Tensor  # [1, T] int64
    is_padding: Tensor  # [T] bool, tokens of no sequence
    packed: PackedSequences
    members: np.ndarray  # [S] int64, indices of the sequences in the batch
    lengths: np.ndarray  # [S] int64, their tokens
    source: np.ndarray  # [R] index of each predicted token in the batch's flat arrays
    sequences: np.ndarray  # [R] int64, index among the S sequences of each predicted token's
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
    whole: WholeSequences
    experts: Tensor | None = None  # [T, layers, K], with router replay
    """Experts of each token. A token that the engine never read takes those of the token before."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every tensor on the device; itself if they are there."""
        if self.tokens.device == device:
            return self
        return replace(self, packed=self.packed.to(device), **tensors_on(self, device))


class MicroBatchBuilder:
    """Builds micro-batches, in main memory, from sequences of a packed batch."""

    def __init__(
        self,
        *,
        inverse_frequencies: Tensor | None,
        token_multiple: int,
        part: ContextPart = ALL,
        takes_experts: bool = False,
    ) -> None:
        """
        Args:
            inverse_frequencies: [D / 2] of the rotary embedding, for our own layers.
            token_multiple: T is padded to a multiple of it, for sequence parallelism.
            part: this rank's part of every sequence.
            takes_experts: whether micro-batches get the experts of their tokens.
        """
        self._inverse_frequencies = inverse_frequencies
        self._token_multiple = token_multiple
        self._part = part
        self._takes_experts = takes_experts

    def build(
        self,
        batch: PackedBatch,
        members: Sequence[int] | np.ndarray,
        *,
        predicted: np.ndarray,
        policy_version: int | None,
    ) -> MicroBatch:
        """Pack the given sequences in this order; without any, return only padding.

        Args:
            members: sequences of the batch.
            predicted: [tokens of the batch] bool, tokens that the head predicts.
            policy_version: of the current weights; None if stale tokens need not be known.
        """
        starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        members = np.asarray(members, dtype=np.int64)
        lengths = stops[members] - starts[members]
        source = _concatenate([np.arange(starts[i], stops[i]) for i in members])
        padded, row_of = self._lay_out(lengths)
        here = np.flatnonzero(row_of >= 0)
        tokens = np.zeros(sum(padded) // self._part.size, dtype=batch.tokens.dtype)
        tokens[row_of[here]] = batch.tokens[source[here]]
        is_padding = np.ones(len(tokens), dtype=np.bool_)
        is_padding[row_of[here]] = False
        chosen = np.flatnonzero(predicted[source])
        rows = row_of[chosen - 1]
        own = np.flatnonzero(rows >= 0)
        rows, of_rows = rows[own], source[chosen[own]]
        versions = batch.policy_versions[source[chosen]]
        is_current = versions == policy_version
        is_stale = (versions != NO_VERSION) & ~is_current & (policy_version is not None)
        sequences = np.repeat(np.arange(len(members)), lengths)[chosen]

        def at_rows(values: np.ndarray) -> Tensor:
            spread = np.zeros(len(tokens), dtype=values.dtype)
            spread[rows] = values[of_rows]
            return _tensor(spread)

        return MicroBatch(
            tokens=_tensor(tokens)[None, :],
            is_padding=_tensor(is_padding),
            packed=pack_sequences(padded, self._inverse_frequencies, self._part),
            members=members,
            lengths=lengths,
            source=of_rows,
            sequences=sequences[own],
            rows=_tensor(rows),
            targets=at_rows(batch.tokens),
            advantages=at_rows(batch.advantages),
            loss_weights=at_rows(batch.loss_weights),
            logprobs_rollout=_tensor(batch.logprobs_rollout[of_rows]),
            is_current=_tensor(is_current[own]),
            is_stale=_tensor(is_stale[own]),
            num_stale=int(is_stale[own].sum()),
            num_tokens=len(here),
            whole=WholeSequences(
                sequences=sequences,
                own=own,
                is_current=is_current,
                has_stale=bool(is_stale.any()),
            ),
            experts=self._experts(batch, members, row_of, num_rows=len(tokens)),
        )

    def _experts(
        self, batch: PackedBatch, members: np.ndarray, row_of: np.ndarray, *, num_rows: int
    ) -> Tensor | None:
        """Return [T, layers, K] in the tokens' rows; padding goes to the first K experts."""
        if not (self._takes_experts and batch.experts):
            return None
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

    def _lay_out(self, lengths: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return padded lengths, and each token's row on this rank (-1: on another rank)."""
        padded = self._padded_lengths(lengths)
        places = self._part.places(padded)
        rows = np.full(sum(padded), -1)
        rows[places] = np.arange(len(places))
        firsts = np.cumsum(padded) - padded
        pieces = [rows[first : first + n] for first, n in zip(firsts, lengths, strict=False)]
        return padded, _concatenate(pieces)

    def _padded_lengths(self, lengths: np.ndarray) -> list[int]:
        """Return lengths that context parallelism can divide, and padding to the multiple."""
        chunks, ranks = self._part.chunks_per_sequence, self._part.size
        padded = (-(-lengths // chunks) * chunks).tolist()
        multiple = math.lcm(self._token_multiple, chunks // ranks)
        padding = -sum(padded) // ranks % multiple if padded else multiple
        return [*padded, padding * ranks] if padding else padded


def response_tokens(batch: PackedBatch) -> np.ndarray:
    """Return [T] bool: the tokens after the prompts."""
    assert (batch.prompt_lengths > 0).all(), "the first token of a prompt has no predecessor"
    lengths = np.diff(batch.cu_seqlens)
    starts = np.repeat(batch.cu_seqlens[:-1], lengths)
    prompt_lengths = np.repeat(batch.prompt_lengths, lengths)
    sampled: np.ndarray = np.arange(len(batch.tokens)) - starts >= prompt_lengths
    return sampled


def trained_tokens(batch: PackedBatch) -> tuple[np.ndarray, int]:
    """Return [T] bool of tokens with a loss, and the number dropped without an engine log-prob."""
    weighted = batch.loss_weights != 0.0
    scored = np.isfinite(batch.logprobs_rollout)
    return weighted & scored, int((weighted & ~scored).sum())


def version_gaps(batch: PackedBatch, policy_version: int) -> np.ndarray:
    """Return [T] int32: publications between a token's sampling and `policy_version`.

    Tokens that no policy sampled have 0.
    """
    versions = batch.policy_versions
    return np.where(versions == NO_VERSION, 0, policy_version - versions)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _concatenate(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
