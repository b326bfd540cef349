"""A mini-batch as one rank's micro-batches, cut alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch, MicroBatchBuilder, response_tokens
from megadapo.trainer.batch.partition import partition
from megadapo.trainer.config import TrainerConfig


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
