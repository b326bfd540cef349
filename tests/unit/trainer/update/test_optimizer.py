"""AdamW in one pass over its tensors, as ranks of a distributed optimizer have it."""

import torch

from megadapo.trainer.update.optimizer import use_fused_adamw


def test_rank_without_parameters_of_a_group_can_step():
    """A rank's part of the buffer may be inside one matrix and contain no norm's weight."""
    torch.manual_seed(0)
    start, gradient = torch.randn(70), torch.randn(70)
    results = []
    for one_pass in (False, True):
        weight = torch.nn.Parameter(start.clone())
        groups = [{"params": [], "weight_decay": 0.0}, {"params": [weight]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        if one_pass:
            use_fused_adamw(optimizer)
            assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        for _ in range(3):
            weight.grad = gradient
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
