"""Weights and optimizer state on disk, readable at any other tensor, pipeline or data split.

The learning rate follows from the step number and nothing here draws random numbers after the
start, so weights, fp32 masters and Adam moments are the trainer's whole state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megadapo.errors import CheckpointError
from megadapo.trainer.megatron_internals import own_step_counts

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Optimizer state by parameter, not by buffer: other formats load at the same split only."""


def save_checkpoint(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, folder: Path
) -> None:
    """Write the state into an empty folder, made if need be; collective over all ranks.

    Raises:
        CheckpointError: the folder is not empty, or writing failed on some rank.
    """
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(chunks, optimizer, is_loading=False)
    try:
        dist_checkpointing.save(state, str(folder))
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def load_checkpoint(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, folder: Path
) -> None:
    """Read a state that `save_checkpoint` wrote; collective over all ranks.

    Raises:
        CheckpointError: the folder is damaged, or has not exactly this model's state.
    """
    # without is_loading the moments are not allocated, and would silently stay zero
    expected = _sharded_state(chunks, optimizer, is_loading=True)
    try:
        state = dist_checkpointing.load(expected, str(folder), strict=StrictHandling.RAISE_ALL)
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model"][str(number)], strict=True)
    with own_step_counts(optimizer):
        optimizer.load_state_dict(state["optimizer"])


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    """Every tensor carries its place in the whole model, so the chunks are not part of the file."""
    metadata = dict(METADATA)  # megatron-core notes its process groups in it
    weights = {
        str(number): chunk.module.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        ),
    }
