"""A teacher in the trainer's ranks: a reference policy with sizes and modules of its own.

It computes log-probs only, so it has neither gradient buffers nor an optimizer. It is split like
the policy and reads the policy's micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megadapo.models.description import ModelDescription, describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.packing import with_rotary
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.model import rotary_of_own_layers
from megadapo.trainer.model.model_layout import validate_teacher
from megadapo.trainer.model.parallel import context_part
from megadapo.trainer.offload import OffloadedStorages, storages_of
from megadapo.trainer.trained_model import RankModel
from megadapo.trainer.types import TrainerSettings
from megadapo.trainer.update.step import compute_logprobs
from megadapo.weights.disk.sources import SafetensorsFolder, TensorSource


class Teacher(RankModel):
    """This rank's part of the teacher; `logprobs_of` is collective over the trainer's ranks."""

    def __init__(
        self, settings: TrainerSettings, *, policy: ModelDescription, device: torch.device
    ) -> None:
        """`policy`: the model whose micro-batches the teacher reads."""
        path = settings.algorithm.reference.path
        assert path is not None, "a teacher needs its folder"
        folder = resolve_model_folder(path, with_weights=True, key="algorithm.reference.path")
        model = describe_model(read_hf_config(folder))
        validate_teacher(model, policy, settings.trainer)
        super().__init__(settings, model, folder, needs_weights=True)
        self._head = PolicyHead(
            objective=settings.algorithm.objective,
            temperature=settings.temperature,
            vocab_size=model.shape.vocab_size,
            # no update changes its weights
            wait_for_weight=lambda weight: None,
        )
        self._frequencies = rotary_of_own_layers(model)
        self._storages: OffloadedStorages | None = None
        if device.type == "cuda" or "parameters" in settings.trainer.offload:
            self._storages = OffloadedStorages(
                lambda: storages_of(self.parameters.values()), device, keeps_values=True
            )
            self._storages.evict()

    def first_weights(self) -> TensorSource:
        """Return the folder's tensors, also for a policy that starts from random numbers."""
        return SafetensorsFolder(self.model_folder)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Have the weights on the device for the block; between blocks they are in main memory."""
        if self._storages is None:
            yield
            return
        self._storages.prefetch()
        self._storages.wait()
        yield
        self._storages.evict()

    def logprobs_of(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs [T] of each micro-batch on the last pipeline stage, else an empty list.

        They are those of the teacher's logits at the policy's temperature.
        """
        if self._frequencies is not None:
            micro_batches = [
                replace(
                    micro_batch,
                    packed=with_rotary(micro_batch.packed, self._frequencies, context_part()),
                )
                for micro_batch in micro_batches
            ]
        with torch.no_grad():
            return compute_logprobs(self.chunks, self._head, micro_batches, replays=False)
