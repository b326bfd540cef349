"""The reference policy: a second set of weights in main memory, and the KL divergence to it.

The policy's own modules compute it, with its weights swapped in. So equal weights give equal bits,
and no second model is on the device. A teacher is another model, with its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.advantages import advantages_with_kl
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.algorithm.reference import kl_estimates
from megadapo.data.batch import PackedBatch
from megadapo.errors import CheckpointError
from megadapo.models.description import ModelDescription, describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.batch.packing import with_rotary
from megadapo.trainer.checkpoint.checkpoint import read_state
from megadapo.trainer.checkpoint.pieces import runs_of_copies
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.model import rotary_of_own_layers
from megadapo.trainer.model.model_layout import validate_teacher
from megadapo.trainer.model.parallel import context_part, has_results
from megadapo.trainer.offload import OffloadedStorages, storages_of
from megadapo.trainer.trained_model import RankModel, TrainedModel
from megadapo.trainer.types import REFERENCE_FOLDER, TrainerSettings
from megadapo.trainer.update.optimizer import gather_weights_now
from megadapo.trainer.update.step import compute_logprobs, without_experts
from megadapo.weights.disk.sources import TensorSource, open_weights


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
        return open_weights(self.model_folder, self.layout)

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
        return compute_logprobs(self.chunks, self._head, without_experts(micro_batches))


class ReferencePolicy:
    """This rank's part of the reference; created while the policy has the run's first weights."""

    def __init__(self, policy: TrainedModel, head: PolicyHead, device: torch.device) -> None:
        """`head`: the policy's."""
        self._config = policy.settings.algorithm.reference
        self._chunks, self._parameters, self._head = policy.chunks, policy.parameters, head
        self._teacher: Teacher | None = None
        if self._config.path is not None:
            self._teacher = Teacher(policy.settings, policy=policy.model, device=device)
        kept = self._parameters if self._teacher is None else {}
        # pinned, if the parameters are on a GPU
        self._weights = {
            name: torch.empty_like(
                value, device="cpu", pin_memory=value.is_cuda, requires_grad=False
            ).copy_(value.detach())
            for name, value in kept.items()
        }
        copies = {} if self._config.refresh_every is None else self._weights
        self.runs = runs_of_copies(
            self._chunks, {self._parameters[name]: value for name, value in copies.items()}
        )
        """The reference's weights as a checkpoint has them; empty if they never change."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the reference's weights into the policy's modules for the block; collective."""
        self._exchange()
        yield
        self._exchange()

    def add_logprobs(
        self,
        batch: PackedBatch,
        trained: np.ndarray,
        split: Sequence[MiniBatch],
        algorithm: AlgorithmConfig,
        *,
        kl_reward_coef: float,
    ) -> list[MiniBatch]:
        """Return the mini-batches with the reference's log-probs; collective.

        If rewards include the KL divergence, they also get advantages of these rewards, unless a
        critic computes the advantages.

        Args:
            trained: [tokens of the batch] bool, tokens that have a KL divergence.
            split: the rank's part of each mini-batch, with its old policy.
        """
        if batch.logprobs_ref is None:
            logprobs_ref = self.logprobs(split)
        else:
            logprobs_ref = [_at_rows(batch.logprobs_ref, mini_batch) for mini_batch in split]
        objective = algorithm.objective
        found = [
            mini_batch.with_policy(with_reference(mini_batch, values, objective))
            for mini_batch, values in zip(split, logprobs_ref, strict=True)
        ]
        if objective.kl_in == "loss" or algorithm.advantage == "gae":
            return found
        return self._with_kl_in_reward(batch, trained, found, algorithm, kl_reward_coef)

    def logprobs(self, split: Sequence[MiniBatch]) -> list[list[Tensor]]:
        """Return log-probs [T] of each micro-batch of each mini-batch; collective.

        Lists are empty except on the last pipeline stage.
        """
        if self._teacher is not None:
            with self._teacher.resident():
                return [self._teacher.logprobs_of(mini_batch) for mini_batch in split]
        with self.swapped_in():
            # the reference's routers choose their own experts
            return [
                compute_logprobs(self._chunks, self._head, without_experts(mini_batch))
                for mini_batch in split
            ]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take over the policy's weights after the updates of `step`, from 1, if it is time."""
        refresh_every = self._config.refresh_every
        if refresh_every is not None and step % refresh_every == 0:
            for name, weight in self._weights.items():
                weight.copy_(self._parameters[name])

    def load(self, folder: Path) -> None:
        """Read the reference from a trainer's checkpoint of any split; collective.

        Raise CheckpointError if it has no reference, or one that does not fit.
        """
        if self._config.refresh_every is None:
            return
        if not (folder / REFERENCE_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no weights of a reference policy, because its run kept the first "
                "ones: leave out algorithm.reference.refresh_every"
            )
        read_state(self.runs, folder / REFERENCE_FOLDER)

    @torch.no_grad()
    def _exchange(self) -> None:
        # a gather that is still under way would overwrite the weights that are swapped in
        gather_weights_now(self._chunks)
        for name, kept in self._weights.items():
            parameter = self._parameters[name]
            current = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(current)

    def _with_kl_in_reward(
        self,
        batch: PackedBatch,
        trained: np.ndarray,
        split: Sequence[MiniBatch],
        algorithm: AlgorithmConfig,
        kl_coef: float,
    ) -> list[MiniBatch]:
        """Return mini-batches with advantages of rewards minus the KL divergence; collective.

        Every rank gets the KL divergence of every token and computes the same advantages.
        """
        kl = self._kl_of_all_tokens(batch, split)[trained]
        num_tokens = np.add.reduceat(trained, batch.cu_seqlens[:-1], dtype=np.int64)
        advantages = np.zeros(len(batch.tokens))
        advantages[trained] = advantages_with_kl(
            batch.rewards,
            kl,
            num_tokens,
            batch.group_sizes,
            kl_coef=kl_coef,
            rule=algorithm.advantage,
            normalize_by_std=algorithm.normalize_by_std,
        )
        return [
            mini_batch.with_policy(
                [
                    micro_batch.with_advantages(advantages[micro_batch.batch_index])
                    for micro_batch in mini_batch
                ]
            )
            for mini_batch in split
        ]

    def _kl_of_all_tokens(self, batch: PackedBatch, split: Sequence[MiniBatch]) -> np.ndarray:
        """Return [tokens of the batch] float64, 0 for tokens without a KL divergence."""
        kl = torch.zeros(len(batch.tokens), dtype=torch.float64)
        if has_results():
            for micro_batch in (micro_batch for mini_batch in split for micro_batch in mini_batch):
                assert micro_batch.kl is not None, "with_reference sets it"
                kl[torch.from_numpy(micro_batch.batch_index)] = micro_batch.kl.cpu()
        kl = kl.to(next(iter(self._parameters.values())).device)
        torch.distributed.all_reduce(kl)
        return kl.cpu().numpy()


def _at_rows(known: np.ndarray, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return [T] of each micro-batch on the last pipeline stage, else an empty list."""
    if not mpu.is_pipeline_last_stage():
        return []
    return [micro_batch.at_rows(known[micro_batch.batch_index]) for micro_batch in micro_batches]


def with_reference(
    micro_batches: Sequence[MicroBatch], logprobs_ref: Sequence[Tensor], objective: PolicyObjective
) -> list[MicroBatch]:
    """Return a mini-batch's micro-batches with the KL divergence to the reference.

    `logprobs_ref`: [T] of each, from the same shapes as the old ones; empty, like the result,
    except on the last pipeline stage.
    """
    found = []
    for micro_batch, values in zip(micro_batches, logprobs_ref, strict=False):
        rows, proximal = micro_batch.rows, micro_batch.proximal
        assert proximal is not None, "computed before"
        gap = (values[rows] - proximal[rows]).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # ratio of the old policy to the one that sampled the token
        to_sampler, weights = torch.ones_like(gap), micro_batch.importance_weights
        if weights is not None:
            to_sampler = weights[rows].double()
        kl = kl_estimates(gap, to_sampler, objective.kl_value)
        in_loss = objective.kl_loss_coef != 0.0
        found.append(replace(micro_batch, kl=kl, logprobs_ref=values if in_loss else None))
    return found
