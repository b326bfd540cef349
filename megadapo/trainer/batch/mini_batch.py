"""A mini-batch as one rank's micro-batches, cut alike on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch, MicroBatchBuilder, response_tokens
from megadapo.trainer.config import TrainerConfig

LINEAR_FLOPS_PER_HIDDEN = 6
"""Attention scores cost as much as a layer's matrices at about 6 x hidden size tokens of context:
12 H^2 multiply-adds a token for the matrices, 2 H per token of (causally halved) context."""


def sequence_cost(length: int, hidden_size: int) -> float:
    """Compute of a sequence, in units of one token's matrix products."""
    return length * (1.0 + length / (2 * LINEAR_FLOPS_PER_HIDDEN * hidden_size))


def partition(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int,
    hidden_size: int,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Cut one mini-batch into micro-batches.

    Args:
        lengths: [S] tokens of each sequence.
        num_ranks: data-parallel ranks.
        token_budget: most tokens of a micro-batch; a longer sequence is one by itself.
        hidden_size: of the model, for the cost of attention.
        multiple_of: what the number of micro-batches must be a multiple of.

    Returns:
        [rank][micro_batch] -> sequence indices, ascending. Every rank has the same number of
        micro-batches, at least one; some may be empty.
    """
    costs = [sequence_cost(length, hidden_size) for length in lengths]
    shares = balance(range(len(lengths)), costs, num_ranks)
    packed = [first_fit(share, lengths, token_budget) for share in shares]
    needed = max(1, *(len(bins) for bins in packed))
    num_micro_batches = -(-needed // multiple_of) * multiple_of
    return [
        _spread(share, bins, lengths, costs, num_micro_batches, token_budget)
        for share, bins in zip(shares, packed, strict=True)
    ]


def balance(items: Sequence[int], costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Share items out so that the dearest bin is cheap: dearest item first, to the lightest bin."""
    loads = [(0.0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        load, index = heapq.heappop(loads)
        bins[index].append(item)
        heapq.heappush(loads, (load + costs[item], index))
    return [sorted(members) for members in bins]


def first_fit(items: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Pack items into as few bins of `token_budget` tokens as first-fit-decreasing finds."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        fitting = (index for index, free in enumerate(room) if lengths[item] <= free)
        index = next(fitting, None)
        if index is None:
            bins.append([item])
            room.append(token_budget - lengths[item])
        else:
            bins[index].append(item)
            room[index] -= lengths[item]
    return [sorted(members) for members in bins]


def _spread(
    share: Sequence[int],
    bins: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_micro_batches: int,
    token_budget: int,
) -> list[list[int]]:
    """Micro-batches of even cost, so that pipeline stages wait less; else the tight packing."""
    even = balance(share, costs, num_micro_batches)
    if all(len(b) <= 1 or sum(lengths[i] for i in b) <= token_budget for b in even):
        return even
    return bins + [[] for _ in range(num_micro_batches - len(bins))]


class MiniBatch(Sequence[MicroBatch]):
    """Micro-batches that wait in host memory; each is on the device while somebody holds it.

    A step has many mini-batches and one of them is computed at a time, so that a step's length
    costs no device memory.
    """

    def __init__(self, waiting: Sequence[MicroBatch], device: torch.device) -> None:
        self._waiting, self._device = waiting, device

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> MiniBatch: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | MiniBatch:
        if isinstance(index, slice):
            return MiniBatch(self._waiting[index], self._device)
        return self._waiting[index].to(self._device)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (micro_batch.to(self._device) for micro_batch in self._waiting)

    @property
    def num_tokens(self) -> int:
        """Of whole sequences: the same on all context-parallel ranks."""
        return sum(int(micro_batch.lengths.sum()) for micro_batch in self._waiting)


class MiniBatchCutter:
    """Cuts mini-batches for this rank; every rank of a data-parallel copy gets the same ones."""

    def __init__(
        self,
        builder: MicroBatchBuilder,
        trainer: TrainerConfig,
        *,
        hidden_size: int,
        device: torch.device,
    ) -> None:
        """`device`: where micro-batches are computed."""
        self._builder, self._device = builder, device
        # the interleaved schedule takes micro-batches in groups of as many as there are stages
        self.multiple_of = trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1
        self._shares = partial(
            partition,
            num_ranks=trainer.data_parallel,
            token_budget=trainer.tokens_per_micro_batch,
            hidden_size=hidden_size,
            multiple_of=self.multiple_of,
        )

    def cut(
        self, batch: PackedBatch, *, predicted: np.ndarray, policy_version: int | None
    ) -> list[MiniBatch]:
        """All mini-batches of a batch.

        Args:
            predicted: [tokens of the batch] bool, which tokens the head predicts.
            policy_version: of the present weights; None: who sampled a token does not matter.
        """
        lengths = np.diff(batch.cu_seqlens)
        return [
            MiniBatch(
                [
                    self._builder.build(
                        batch, indices[members], predicted=predicted, policy_version=policy_version
                    )
                    for members in self._shares(lengths[indices].tolist())[
                        mpu.get_data_parallel_rank()
                    ]
                ],
                self._device,
            )
            for indices in batch.mini_batches
        ]

    def cut_responses(self, batch: PackedBatch) -> list[MiniBatch]:
        """All mini-batches, with every token behind a prompt predicted."""
        return self.cut(batch, predicted=response_tokens(batch), policy_version=None)

    def alone(
        self, batch: PackedBatch, members: np.ndarray, *, predicted: np.ndarray, policy_version: int
    ) -> MicroBatch:
        """The given sequences of a batch and no others as one micro-batch, on the device."""
        micro_batch = self._builder.build(
            batch, members, predicted=predicted, policy_version=policy_version
        )
        return micro_batch.to(self._device)
