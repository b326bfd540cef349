"""The reference policy: a second set of weights that waits on the host.

It is computed by the policy's own modules, whose weights it changes places with: same code, same
layout, same kernels, so that equal weights give equal bits, and no second model on the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megadapo.algorithm.advantages import advantages_with_kl
from megadapo.algorithm.config import ReferenceConfig
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.algorithm.reference import kl_estimates
from megadapo.data.batch import PackedBatch
from megadapo.errors import CheckpointError
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.types import TrainerSettings
from megadapo.trainer.update.optimizer import gather_weights_now
from megadapo.weights.disk.export import carry_along
from megadapo.weights.disk.files import Files, entry_of, sync_path
from megadapo.weights.disk.load import import_weights, match_params
from megadapo.weights.disk.sources import MANIFEST_NAME, manifest_of, rank_file_name
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition

FOLDER = "reference"
"""Where a checkpoint of the trainer has the reference's weights, unless they are those that the run
began with: a folder of converted shards."""


class ReferencePolicy:
    """One rank's part of it. Made while the policy has the weights that the run began with."""

    def __init__(
        self,
        config: ReferenceConfig,
        chunks: list[DistributedDataParallel],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """`parameters`: the policy's, by global name, which are trained in place."""
        self._config = config
        self._chunks = chunks
        self._parameters = parameters
        self._weights = {name: _on_host(value) for name, value in parameters.items()}
        # a bf16 average would not move by a hundredth of a small update
        self._average = (
            {name: value.float() for name, value in self._weights.items()}
            if config.kind == "averaged"
            else None
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's modules compute the reference within; collective, and bit-exact."""
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take the policy's weights in, as the kind of reference says, after the updates of `step`.

        The first step is 1.
        """
        if self._average is not None:
            for name, average in self._average.items():
                average.lerp_(self._parameters[name].detach().cpu().float(), 1 - self._config.decay)
                self._weights[name].copy_(average)
        elif self._config.kind == "refreshed" and step % self._config.refresh_every == 0:
            for name, weight in self._weights.items():
                weight.copy_(self._parameters[name])

    def snapshot(
        self, layout: ModelLayout, position: ShardPosition, base_folder: Path
    ) -> Callable[[Path], Files]:
        """Copy what `load` reads; collective.

        Returns:
            Writes it into the trainer's checkpoint, while the reference may change.
        """
        if self._config.kind == "fixed":
            return lambda folder: {}
        positions: list[ShardPosition] = [position] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(positions, position)
        shards = {}
        if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
            pairs = match_params(self._kept, layout, position)
            shards = {shard.name: value.clone() for shard, value in pairs}
        is_first = torch.distributed.get_rank() == 0
        return partial(
            _write_copy,
            shards,
            own_name=rank_file_name(position),
            positions=list(dict.fromkeys(positions)),
            base_folder=base_folder if is_first else None,
            dtype=next(iter(self._kept.values())).dtype,
        )

    def load(self, folder: Path, layout: ModelLayout, position: ShardPosition) -> None:
        """Read what a snapshot was written as, at whatever split it was written.

        Raises:
            CheckpointError: the checkpoint has no reference.
            WeightError: it is damaged, or of another model.
        """
        if self._config.kind == "fixed":
            return
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no weights of a reference that algorithm.reference.kind = "
                f'"{self._config.kind}" could go on with: set the kind back to "fixed"'
            )
        import_weights(folder / FOLDER, self._kept, layout, position)
        for name, kept in self._kept.items():
            self._weights[name].copy_(kept)

    @property
    def _kept(self) -> dict[str, Tensor]:
        """What the reference is made of from step to step."""
        return self._weights if self._average is None else self._average

    @torch.no_grad()
    def _exchange(self) -> None:
        # weights that are still on their way would overwrite those that are put in
        gather_weights_now(self._chunks)
        for name, kept in self._weights.items():
            parameter = self._parameters[name]
            present = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(present)


def _write_copy(
    shards: dict[str, Tensor],
    folder: Path,
    *,
    own_name: str,
    positions: list[ShardPosition],
    base_folder: Path | None,
    dtype: torch.dtype,
) -> Files:
    """One rank's shards, where it has any, and what belongs to them from the first rank.

    `base_folder`: the model's, on the first rank only.

    Raises:
        OSError: it could not be written.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    written = []
    if shards:
        try:
            save_file(shards, target / own_name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{target / own_name}: {error}") from error
        written.append(own_name)
    if base_folder is not None:
        carry_along(base_folder, target, dtype)
        manifest = manifest_of(positions)
        (target / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
        of_ranks = {rank_file_name(position) for position in positions}
        written += sorted({path.name for path in target.iterdir()} - of_ranks)
    for name in written:
        sync_path(target / name)
    sync_path(target)
    return {f"{FOLDER}/{name}": entry_of(target / name) for name in written}


def _on_host(value: Tensor) -> Tensor:
    """A copy in memory of the host that the device reads and writes without another copy."""
    copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
    return copy.copy_(value.detach())


def with_reference(
    micro_batches: Sequence[MicroBatch],
    old: Sequence[OldPolicy],
    logprobs_ref: Sequence[Tensor],
    objective: PolicyObjective,
) -> list[OldPolicy]:
    """What a mini-batch's update is held against, and what the reference says of it.

    Args:
        micro_batches: of the mini-batch.
        old: of each of them; empty except on the last pipeline stage.
        logprobs_ref: [T] of each of them, from the same shapes as the old ones; empty as `old` is.
        objective: which estimator, and where it enters.
    """
    held = []
    for micro_batch, policy, values in zip(micro_batches, old, logprobs_ref, strict=False):
        rows = micro_batch.rows
        gap = (values[rows] - policy.proximal[rows]).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # held against itself, the old policy has a ratio of 1
        kl = kl_estimates(gap, torch.ones_like(gap), objective.kl_value)
        in_loss = objective.kl_loss_coef != 0.0
        held.append(replace(policy, kl=kl, logprobs_ref=values if in_loss else None))
    return held


def with_kl_in_reward(
    batch: PackedBatch,
    trained: np.ndarray,
    cut: Sequence[Sequence[MicroBatch]],
    old: Sequence[Sequence[OldPolicy]],
    *,
    settings: TrainerSettings,
    kl_coef: float,
    contributes: bool,
    device: torch.device,
) -> list[list[OldPolicy]]:
    """Advantages of each token from rewards less the KL divergence; collective over all ranks.

    Every rank gets the KL divergence of every token and computes all advantages alike.

    Args:
        trained: [T] bool, the tokens of the batch that have a KL divergence.
        cut: the rank's micro-batches of each mini-batch.
        old: of each of them, with its KL divergence; empty except on the last pipeline stage.
        kl_coef: weight of the KL divergence in the reward.
        contributes: whether this rank's tokens count; tensor-parallel ranks have the same.

    Returns:
        `old` with these advantages.
    """
    num_tokens = np.add.reduceat(trained, batch.cu_seqlens[:-1], dtype=np.int64)
    kl = _of_all_tokens(batch, cut, old, contributes=contributes, device=device)
    advantages = np.zeros(len(batch.tokens))
    advantages[trained] = advantages_with_kl(
        batch.rewards,
        kl[trained],
        num_tokens,
        batch.group_sizes,
        kl_coef=kl_coef,
        rule=settings.advantage,
        normalize_by_std=settings.normalize_by_std,
    )
    return [
        [
            replace(policy, advantages=_at_rows(micro_batch, advantages))
            for micro_batch, policy in zip(micro_batches, policies, strict=False)
        ]
        for micro_batches, policies in zip(cut, old, strict=True)
    ]


def _of_all_tokens(
    batch: PackedBatch,
    cut: Sequence[Sequence[MicroBatch]],
    old: Sequence[Sequence[OldPolicy]],
    *,
    contributes: bool,
    device: torch.device,
) -> np.ndarray:
    """[T] float64, each token's from the one rank that has it; 0 where nobody has."""
    kl = torch.zeros(len(batch.tokens), dtype=torch.float64)
    if contributes:
        for micro_batches, policies in zip(cut, old, strict=True):
            for micro_batch, policy in zip(micro_batches, policies, strict=True):
                assert policy.kl is not None, "the reference comes first"
                kl[torch.from_numpy(micro_batch.source)] = policy.kl.cpu()
    kl = kl.to(device)
    torch.distributed.all_reduce(kl)
    return kl.cpu().numpy()


def _at_rows(micro_batch: MicroBatch, values: np.ndarray) -> Tensor:
    """[T] fp32 of the micro-batch from one value for each token of the batch."""
    spread = torch.zeros_like(micro_batch.advantages)
    own = torch.from_numpy(values[micro_batch.source]).to(spread)
    spread[micro_batch.rows] = own
    return spread
