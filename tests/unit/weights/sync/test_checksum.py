"""The checksum of weights against its definition on whole numbers."""

import pytest
import torch

from megadapo.weights.sync.buckets import CHECKSUM_CHUNK, CHECKSUM_MODULUS, checksum


def definition(tensor: torch.Tensor) -> int:
    words = tensor.contiguous().view(-1).view(torch.int16).tolist()
    weighted = sum(place * word for place, word in enumerate(words, 1))

    def wrapped(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    return (wrapped(sum(words)) * 0x9E3779B1 + wrapped(weighted)) % CHECKSUM_MODULUS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_words", [0, 2, 99, 100, 102, 300, 1000])
@pytest.mark.parametrize("chunk", [100, 1 << 24])
def test_checksum_equals_definition(monkeypatch, dtype, num_words, chunk):
    """A GPU sums larger chunks than a CPU, and their numbers are compared."""
    monkeypatch.setitem(CHECKSUM_CHUNK, "cpu", chunk)
    torch.manual_seed(num_words)
    tensor = torch.randn(num_words * 2 // dtype.itemsize).to(dtype)
    assert checksum(tensor) == definition(tensor)
    strided = torch.randn(num_words, 3).to(dtype).T
    assert checksum(strided) == definition(strided)
    if len(tensor):
        changed = tensor.clone()
        changed[-1] = -changed[-1]
        assert checksum(changed) == definition(changed) != checksum(tensor)


def test_gigabytes_on_a_gpu_take_few_launches():
    """In chunks of 65,536 words, launching alone took a second of every step."""
    num_words, launches_of_a_chunk = 4 << 30, 7
    assert num_words / CHECKSUM_CHUNK["cuda"] * launches_of_a_chunk < 2000
