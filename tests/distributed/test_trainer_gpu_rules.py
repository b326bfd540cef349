"""What GPUs ask of a trainer rank and a CPU does not, seen from a rank on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.support.batches import RAGGED, random_batch
from tests.support.ranks import Ranks, settings_for


def _entered_before_any_message(rendezvous, settings) -> dict[str, int]:
    import torch
    from megatron.core import parallel_state as mpu

    from megadapo.trainer.parallel import join_groups

    join_groups(rendezvous, settings.trainer, None, seed=0)
    groups = {
        "world": torch.distributed.group.WORLD,
        "stages": mpu.get_pipeline_model_parallel_group(),
    }
    return {name: group._get_sequence_number_for_group() for name, group in groups.items()}


def test_every_rank_enters_a_group_before_some_of_them_exchange_messages(
    ranks: Ranks, models: Path
) -> None:
    """Catches NCCL waiting forever for the ranks that have no part in a group's first message."""
    settings = settings_for(str(models / "qwen2-tied"), pipeline=2, data=2)
    for entered in ranks.run(4, _entered_before_any_message, settings):
        assert min(entered.values()) > 0, entered


def _calls_that_release_memory(rendezvous, settings, batch, folder) -> list[str]:
    import torch

    from megadapo.trainer.worker import TrainerWorker

    seen = []
    empty_cache = torch.cuda.empty_cache
    torch.cuda.empty_cache = lambda: seen.append(call)
    try:
        worker = TrainerWorker(rendezvous.rank)
        call = "start"
        worker.start(settings, rendezvous, uses_cuda=False)
        for call, arguments in {
            "update": (batch, 0, 1, None, []),
            "save": (folder,),
            "load": (folder,),
        }.items():
            getattr(worker, call)(*arguments)
    finally:
        torch.cuda.empty_cache = empty_cache
    return seen


def test_memory_goes_back_to_the_gpu_after_every_long_call(
    ranks: Ranks, models: Path, tmp_path: Path
) -> None:
    """Catches a trainer that keeps the memory of a step while engines wake up into it."""
    settings = settings_for(str(models / "qwen2-tied"))
    arguments = (settings, random_batch(RAGGED), tmp_path / "state")
    (seen,) = ranks.run(1, _calls_that_release_memory, *arguments)
    assert seen == ["update", "save", "load"]
