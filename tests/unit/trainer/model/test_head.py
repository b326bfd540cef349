"""Options that the trainer's head passes to the kernel, by device."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state as mpu
from torch._subclasses.fake_tensor import FakeTensorMode

from megadapo.algorithm.objective import PolicyObjective
from megadapo.trainer.model.head import PolicyHead


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_passes_get_the_options_of_the_device(monkeypatch, device):
    """Sums over micro-batches that start in the forward pass would have other bits on a CPU."""
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_group", lambda: None)
    head = PolicyHead(
        objective=PolicyObjective(),
        temperature=1.0,
        vocab_size=64,
        wait_for_weight=lambda _: None,
        tp_invariant=device == "cpu",
    )
    with FakeTensorMode():
        hidden, weight = torch.empty(4, 1, 8, device=device), torch.empty(64, 8, device=device)
        layer = SimpleNamespace(weight=weight, sequence_parallel=False)
        _, _, options = head._operands(hidden, layer, None, SimpleNamespace(rows=None))
    assert options["accumulate_in_forward"] == (device == "cuda")
    assert options["tp_invariant"] == (device == "cpu")
