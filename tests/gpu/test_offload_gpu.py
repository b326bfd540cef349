"""Offloaded trainer state frees GPU memory and is restored bitwise while kernels run."""

import pytest
import torch

from megadapo.trainer.offload import OffloadedStorages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (3, 1 << 20, (1 << 26) + 5)


@pytest.mark.parametrize("keeps", [True, False])
def test_offload_frees_memory_and_restores_it(keeps: bool) -> None:
    device = torch.device("cuda")
    tensors = [torch.randn(size, device=device) for size in SIZES]
    views = [tensor[1:] for tensor in tensors]
    expected = [view.cpu() if keeps else torch.zeros_like(view, device="cpu") for view in views]
    storages = OffloadedStorages(
        lambda: [one.untyped_storage() for one in tensors], device, keeps_values=keeps
    )
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        storages.evict()
        assert before - torch.cuda.memory_allocated() >= 4 * sum(SIZES)
        product = matrix
        for _ in range(20):
            product = product @ matrix
        storages.prefetch()
        product = product @ matrix
        storages.wait()
        for view, old in zip(views, expected, strict=True):
            assert torch.equal(view.cpu(), old)
