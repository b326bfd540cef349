"""Actions of a trainer rank for tests of profiles; they run inside the trainer processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.data.batch import PackedBatch
from megadapo.trainer.types import Rendezvous, TrainerSettings, UpdateResult
from tests.support.trainer.probes import build, update

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank


def update_of(
    rendezvous: Rendezvous, settings: TrainerSettings, batch: PackedBatch
) -> UpdateResult:
    return update(build(rendezvous, settings), batch, policy_version=0, step=1)


def profiled_update_of(
    rendezvous: Rendezvous, settings: TrainerSettings, batch: PackedBatch, folder: Path
) -> UpdateResult:
    """The same, with ranges; leaves rank-N.json, a trace of each rank, in the folder."""
    import torch

    from megadapo.trainer.model.layer_ranges import layer_ranges

    rank = build(rendezvous, settings)
    before = num_hooks(rank)
    with layer_ranges(rank.chunks), torch.profiler.profile() as profile:
        result = update(rank, batch, policy_version=0, step=1)
    assert num_hooks(rank) == before, "ranges cost something after they have ended"
    profile.export_chrome_trace(str(folder / f"rank-{rendezvous.rank}.json"))
    return result


def num_hooks(rank: TrainerRank) -> int:
    modules = [module for chunk in rank.chunks for module in chunk.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)
