"""Weights and optimizer state on disk, readable at any other tensor, pipeline or data split.

The learning rate follows from the step number and nothing here draws random numbers after the
start, so weights, fp32 masters and Adam moments are the trainer's whole state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megadapo.errors import CheckpointError

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Optimizer state by parameter, not by buffer: other formats load at the same split only."""


def save_checkpoint(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, folder: Path
) -> None:
    """Write the state into an existing empty folder; collective over all ranks."""
    state = _sharded_state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(folder))


def load_checkpoint(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, folder: Path
) -> None:
    """Read a state that `save_checkpoint` wrote; collective over all ranks.

    Raises:
        CheckpointError: the folder is damaged, or has not exactly this model's state.
    """
    # without is_loading the moments are not allocated, and would silently stay zero
    expected = _sharded_state(model, optimizer, is_loading=True)
    try:
        state = dist_checkpointing.load(expected, str(folder), strict=StrictHandling.RAISE_ALL)
    except CheckpointingException as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error
    model.module.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])


def _sharded_state(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    weights = model.module.sharded_state_dict(metadata=METADATA)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=METADATA
        ),
    }
