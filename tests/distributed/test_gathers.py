"""Gathers beside the compute: torch's coalesced ones corrupt memory at times on Gloo."""

from typing import Any
from unittest import mock

import pytest

from tests.support.trainer.ranks import settings_for

NUM_ROUNDS = 100


def _without_coalesced_gathers() -> Any:
    import torch

    kind = torch.distributed.ProcessGroup
    names = [name for name in dir(kind) if "gather" in name and "coalesced" in name]
    assert names
    refuse = mock.Mock(side_effect=AssertionError("gathers were coalesced"))
    return mock.patch.multiple(kind, **dict.fromkeys(names, refuse))


def _gather_beside_compute(rendezvous: Any, settings: Any, async_ops: bool) -> bool:
    """Four buckets at a time, as megatron-core gathers updated weights under a forward pass."""
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    from megadapo.trainer.model.parallel import join_groups

    join_groups(rendezvous, settings.trainer, None, seed=0)
    group, rank = torch.distributed.group.WORLD, rendezvous.rank
    buckets = [torch.zeros(64 * 40) for _ in range(4)]
    shards = [list(bucket.chunk(2)) for bucket in buckets]
    for number in range(NUM_ROUNDS):
        works = []
        for bucket, parts in zip(buckets, shards, strict=True):
            parts[rank].fill_(2 * number + rank)
            manager = param_and_grad_buffer._coalescing_manager
            with _without_coalesced_gathers(), manager(group, async_ops=async_ops) as work:
                param_and_grad_buffer.dist_all_gather_func(
                    bucket, parts[rank], group=group, async_op=async_ops
                )
            works.append(work)
        for work, parts in zip(works, shards, strict=True):
            if async_ops:
                work.wait()
            if not all((part == 2 * number + owner).all() for owner, part in enumerate(parts)):
                return False
    return True


@pytest.mark.parametrize("async_ops", [True, False])
def test_gathered_weights_are_whole_and_harm_nothing(ranks, async_ops):
    settings = settings_for("unused", data=2)
    assert ranks.run(2, _gather_beside_compute, settings, async_ops) == [True, True]
