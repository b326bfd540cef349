"""Mini-batches split into micro-batches over the data-parallel ranks.

Sequences are balanced over ranks by their cost and then packed under a token budget. The split
depends on the arguments only, so every rank computes the same one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import overload

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megadapo.data.batch import PackedBatch
from megadapo.models.description import ModelDescription
from megadapo.trainer.batch.micro_batch import (
    POLICY_FIELDS,
    MicroBatch,
    build_micro_batch,
)
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.model import rotary_of_own_layers
from megadapo.trainer.model.parallel import context_part

BREAK_EVEN_CONTEXT = 6
"""Context of a token, in hidden sizes, at which its attention costs as much as a layer's matrices:
12 H^2 multiply-adds for the matrices, 2 H for each of 6 H tokens of context."""


class MiniBatch(Sequence[MicroBatch]):
    """Micro-batches in main memory; each is copied to the device when it is read.

    A step computes one mini-batch at a time, so their number costs no device memory.
    """

    def __init__(self, waiting: Sequence[MicroBatch], device: torch.device) -> None:
        self._waiting, self.device = waiting, device

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> MiniBatch: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | MiniBatch:
        if isinstance(index, slice):
            return MiniBatch(self._waiting[index], self.device)
        return self._waiting[index].to(self.device)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (micro_batch.to(self.device) for micro_batch in self._waiting)

    def with_policy(self, computed: Sequence[MicroBatch]) -> MiniBatch:
        """Return the mini-batch with POLICY_FIELDS of its micro-batches as they are in `computed`.

        It is returned unchanged if nothing was computed, as on most pipeline stages.
        """
        if not computed:
            return self
        waiting = [
            replace(old, **{name: getattr(new, name) for name in POLICY_FIELDS})
            for old, new in zip(self._waiting, computed, strict=True)
        ]
        return MiniBatch(waiting, self.device)

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank, prompts included and padding not."""
        return sum(micro_batch.num_tokens for micro_batch in self._waiting)


class MicroBatchSplitter:
    """Splits mini-batches for this rank; all ranks of a data-parallel copy get the same."""

    def __init__(
        self, model: ModelDescription, trainer: TrainerConfig, device: torch.device
    ) -> None:
        """`device`: it gets each micro-batch when the model reads it."""
        self._device = device
        self._build = partial(
            build_micro_batch,
            inverse_frequencies=rotary_of_own_layers(model),
            token_multiple=trainer.tensor_parallel,
            part=context_part(),
            takes_experts=trainer.router_replay,
        )
        self._partition = partial(
            partition,
            num_ranks=trainer.data_parallel,
            token_budget=trainer.tokens_per_micro_batch,
            hidden_size=model.shape.hidden_size,
            # the interleaved schedule needs a multiple of the number of stages
            multiple_of=trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1,
        )

    def split(
        self, batch: PackedBatch, *, predicted: np.ndarray, policy_version: int | None
    ) -> list[MiniBatch]:
        """Return this rank's part of every mini-batch.

        Args:
            predicted: [tokens of the batch] bool, tokens that the head predicts.
            policy_version: of the current weights; None if stale tokens need not be known.
        """
        lengths = np.diff(batch.cu_seqlens)
        mini_batches = []
        for indices in batch.mini_batches:
            parts = self._partition(lengths[indices].tolist())[mpu.get_data_parallel_rank()]
            micro_batches = [
                self._build(
                    batch, indices[members], predicted=predicted, policy_version=policy_version
                )
                for members in parts
            ]
            mini_batches.append(MiniBatch(micro_batches, self._device))
        return mini_batches

    def split_responses(self, batch: PackedBatch) -> list[MiniBatch]:
        """Return this rank's part of every mini-batch, with all response tokens predicted."""
        return self.split(batch, predicted=batch.is_sampled, policy_version=None)


def partition(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int,
    hidden_size: int,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Split one mini-batch into micro-batches.

    Return [rank][micro_batch] -> sequence indices, ascending. Every rank has the same number of
    micro-batches, at least one; some may be empty.

    Args:
        lengths: [S] tokens of each sequence.
        token_budget: largest number of tokens of a micro-batch; a longer sequence is alone.
        multiple_of: divides the number of micro-batches of a rank.
    """
    costs = [sequence_cost(length, hidden_size) for length in lengths]
    shares = balance(range(len(lengths)), costs, num_ranks)
    packed = [first_fit(share, lengths, token_budget) for share in shares]
    needed = max(1, *(len(bins) for bins in packed))
    num_micro_batches = -(-needed // multiple_of) * multiple_of
    return [
        _even_if_they_fit(share, bins, lengths, costs, num_micro_batches, token_budget)
        for share, bins in zip(shares, packed, strict=True)
    ]


def sequence_cost(length: int, hidden_size: int) -> float:
    """Return the compute of a sequence, in units of one token's matrix products."""
    mean_context = length / 2
    return length * (1.0 + mean_context / (BREAK_EVEN_CONTEXT * hidden_size))


def balance(items: Sequence[int], costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Assign the most expensive item first, each to the bin with the lowest load."""
    loads = [(0.0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        load, index = heapq.heappop(loads)
        bins[index].append(item)
        heapq.heappush(loads, (load + costs[item], index))
    return [sorted(members) for members in bins]


def first_fit(items: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Pack items into bins of `token_budget` tokens, by first-fit-decreasing."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        fitting = (index for index, tokens in enumerate(free) if lengths[item] <= tokens)
        index = next(fitting, None)
        if index is None:
            bins.append([item])
            free.append(token_budget - lengths[item])
        else:
            bins[index].append(item)
            free[index] -= lengths[item]
    return [sorted(members) for members in bins]


def _even_if_they_fit(
    share: Sequence[int],
    bins: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_micro_batches: int,
    token_budget: int,
) -> list[list[int]]:
    """Return micro-batches of even cost, so that pipeline stages wait less.

    If one of them exceeds the budget, return `bins` and empty micro-batches instead.
    """
    even = balance(share, costs, num_micro_batches)
    if all(len(b) <= 1 or sum(lengths[i] for i in b) <= token_budget for b in even):
        return even
    return bins + [[] for _ in range(num_micro_batches - len(bins))]
