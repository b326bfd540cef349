"""Ranks with weights but no trainer, and a target that keeps all shards."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megadapo.weights.disk.load import import_weights
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


def rank_params(folder, layout, position):
    params = {shard.name: torch.empty(shard.shape) for shard in layout.megatron_shards(position)}
    import_weights(folder, params, layout, position)
    return params


class Kept:
    """A target that keeps every shard."""

    def __init__(self):
        self.done, self.old = {}, {}

    def begin(self, name, shape):
        return self.old.get(name, torch.zeros(shape))

    def complete(self, name, tensor):
        self.done[name] = tensor

    def compare(self, folder, layout, position):
        hf = load_file(folder / "model.safetensors")
        for shard in layout.engine_shards(position):
            for offset, run in shard.placed_runs():
                expected = hf[run.tensor].narrow(shard.axis, run.start, run.size)
                actual = self.done[shard.name].narrow(shard.axis, offset, run.size)
                assert torch.equal(actual, expected), shard.name
