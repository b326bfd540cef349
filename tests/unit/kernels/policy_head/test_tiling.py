"""Blocks and tiles: on CUDA they fill a GPU's waves, on the CPU they are as before."""

import math

import pytest
import torch

from megadapo.kernels.policy_head.tiling import Tiling, plan_tiling
from tests.support.trainer.head_cases import check_head, make_case

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def waves(num_rows: int, num_columns: int) -> float:
    """Return the waves of a product of 128 x 256 tiles on 132 multiprocessors."""
    return -(-num_rows // 128) * -(-num_columns // 256) / 132


@pytest.mark.parametrize(
    "num_tokens, hidden, vocab",
    [
        (20_480, 5120, 152_064),
        (65_536, 5120, 152_064),
        (18_000, 5120, 152_064),
        (20_480, 3584, 152_064),
        (20_480, 2048, 151_936),
    ],
)
def test_blocks_fill_waves(num_tokens, hidden, vocab):
    """Blocks of 5,120 rows take 28 waves for d_hidden, where all rows at once take 25."""
    tiling = plan_tiling(vocab, hidden, torch.bfloat16, CUDA)
    sizes = [stop - start for start, stop in tiling.blocks(num_tokens)]
    assert sum(sizes) == num_tokens
    assert max(sizes) * vocab * 2 <= 3 << 29
    spent = sum(math.ceil(waves(rows, hidden)) for rows in sizes)
    assert spent <= math.ceil(waves(num_tokens, hidden)) + 1
    for rows in sizes[:-1]:
        tiles = [stop - start for start, stop in tiling.tiles(rows)]
        assert not any(tile % 128 for tile in tiles) and max(tiles) * vocab * 4 <= 3 << 29


def test_cpu_keeps_its_blocks():
    """Other blocks would change the bits of every run."""
    tiling = plan_tiling(16_384, 512, torch.float32, CPU)
    assert tiling == Tiling(block_rows=384, tile_rows=384, is_even=True)
    assert tiling.blocks(1000) == [(0, 384), (384, 768), (768, 1000)]
    tiling = plan_tiling(16_384, 512, torch.bfloat16, CPU)
    assert tiling == Tiling(block_rows=1024, tile_rows=256, is_even=True)
    assert tiling.blocks(1100) == [(0, 576), (576, 1100)]
    assert tiling.tiles(600) == [(0, 256), (256, 512), (512, 600)]
    assert tiling.blocks(0) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_do_not_change_the_result(dtype):
    case = make_case(150, 40, 1000, padded=1024, dtype=dtype)
    check_head(case, chunk_tokens=64, tile_tokens=24)
    check_head(case, chunk_tokens=64, tile_tokens=24, tp_invariant=False)
