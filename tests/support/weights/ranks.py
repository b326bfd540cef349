"""Ranks without a trainer, in processes of one Gloo group."""

from pathlib import Path

import torch
import torch.distributed as dist

from megadapo.weights.disk.sources import fill_shard, match_params, open_weights
from tests.support.processes.forked import run_processes


def run_ranks(
    function, world_size: int, tmp_path: Path, *args: object, fresh: bool = False
) -> None:
    """Run `function(rank, *args)` in processes of one Gloo group."""
    meeting = tmp_path / "meeting"
    meeting.unlink(missing_ok=True)
    run_processes(_joined, (world_size, meeting, function, args), world_size, fresh=fresh)


def _joined(rank: int, world_size: int, meeting: Path, function, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    function(rank, *args)
    dist.destroy_process_group()


def import_weights(folder, params, layout, position):
    """Fill a rank's parameters in place from a Hugging Face folder."""
    source = open_weights(folder, layout)
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)
