"""AdamW in one pass over its tensors, as ranks of a distributed optimizer have it."""

from __future__ import annotations

import torch

from megadapo.trainer.update.optimizer import take_one_pass


def test_a_rank_that_owns_nothing_of_a_group_steps_like_the_others() -> None:
    """A rank whose part of the buffer lies inside one matrix has no weight of a norm."""
    torch.manual_seed(0)
    start, gradient = torch.randn(70), torch.randn(70)
    results = []
    for one_pass in (False, True):
        weight = torch.nn.Parameter(start.clone())
        groups = [{"params": [], "weight_decay": 0.0}, {"params": [weight]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        if one_pass:
            take_one_pass(optimizer)
            assert [group["fused"] for group in optimizer.param_groups] == [None, True]
        for _ in range(3):
            weight.grad = gradient
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_tensors_elsewhere_are_left_to_torch() -> None:
    """On a GPU torch chooses among its own ways, and keeps that choice only if nothing is set."""
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    take_one_pass(optimizer)
    assert optimizer.param_groups[0]["fused"] is None
