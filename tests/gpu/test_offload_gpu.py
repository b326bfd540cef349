"""A rank's state on the GPU: offloaded and restored bitwise, copied, and drawn at random."""

from types import SimpleNamespace

import pytest
import torch

from megadapo.trainer.offload import OffloadedStorages
from megadapo.trainer.trained_model import DRAWN_AT_ONCE, RandomTensors
from megadapo.weights.host_memory import HostMemory

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


def test_pinned_copies_have_the_bits_of_the_work_before_them() -> None:
    """Catches copies that start too early or are not waited for, also in memory that is reused."""
    device, memory = torch.device("cuda"), HostMemory(pinned=True)
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64
    addresses = []
    for _ in range(3):
        memory.reset()
        for _ in range(50):
            matrix = matrix @ matrix.T / matrix.norm()
        sources = [matrix, matrix.float()[1:], matrix[:0]]
        with memory.copying() as copy:
            copies = [copy(source) for source in sources]
        assert all(one.is_pinned() for one in copies if len(one))
        assert [one.equal(source.cpu()) for one, source in zip(copies, sources, strict=True)] == (
            [True] * 3
        )
        addresses.append([one.data_ptr() for one in copies])
    assert addresses[0] == addresses[1] == addresses[2]


def test_random_weights_are_the_same_at_every_split() -> None:
    """Catches draws that depend on the slices that a rank reads, or on what was drawn before."""
    shapes = {"a.weight": (512, 3 * DRAWN_AT_ONCE // 256), "b.weight": (512, 300), "c.bias": (7,)}
    layout = SimpleNamespace(hf_shapes=shapes, shape=SimpleNamespace(num_layers=2))
    device = torch.device("cuda", torch.cuda.current_device())
    one, other = (RandomTensors(layout, std=0.02, seed=3, device=device) for _ in range(2))
    whole = {name: one.read(name, 0, 0, shape[0]) for name, shape in shapes.items()}
    for name, shape in reversed(shapes.items()):
        parts = [other.read(name, 0, start, start + 1) for start in range(shape[0])]
        assert whole[name].is_cuda and torch.equal(torch.cat(parts), whole[name])
    drawn = whole["a.weight"].view(-1).split(DRAWN_AT_ONCE)
    assert all(abs(part.std().item() / 0.02 - 1) < 0.02 for part in drawn)
    assert not torch.equal(drawn[0], drawn[1])
