"""The policy head's Triton kernels and cuBLAS products on a real GPU."""

import pytest
import torch
from baselines.head_inputs import PRODUCTS, HeadShape, loss_step, make_inputs, ours
from head import bench_head
from shared import peak_extra_mib

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import policy_head_loss, token_logprobs
from megadapo.kernels.policy_head.blocks import merge_stats, row_stats
from megadapo.kernels.policy_head.products import mm_rows
from megadapo.kernels.policy_head.tiles import Tile, VocabShards
from tests.support.trainer.head_cases import check_head, make_case, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERYTHING = PolicyObjective(dual_clip=3.0, entropy_coef=0.02, kl_coef=0.1)


CARD = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
BOUND = next((bound for card, bound in (("H200", 1.12), ("H100", 1.16)) if card in CARD), None)
"""Most time that the head may take, in times of its three products."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "peaked", "negative"])
@pytest.mark.parametrize("num_tokens", [1, 63, 257, 4099])
def test_matches_fp64(num_tokens: int, kind: str, dtype: torch.dtype) -> None:
    case = make_case(num_tokens, 40, 3000, padded=3072, kind=kind, dtype=dtype, device="cuda")
    check_head(case, chunk_tokens=256)


@pytest.mark.parametrize("vocab_size, padded", [(129_920, 129_920), (151_669, 151_680)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vocabularies(vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    check_head(make_case(130, 256, vocab_size, padded=padded, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
def test_long_sums_are_rounded_once(num_rows: int) -> None:
    """cuBLAS splits the sum of a small product, by default into parts rounded to its dtype."""
    torch.manual_seed(0)
    a = torch.randn(num_rows, 130_000, device="cuda").bfloat16()
    b = torch.randn(130_000, 128, device="cuda").bfloat16()
    out = torch.empty(num_rows, 128, device="cuda", dtype=torch.bfloat16)
    mm_rows(a, b, out=out)
    exact = a.double() @ b.double()
    assert relative_error(out, exact) <= 1.05 * relative_error(exact.bfloat16(), exact)


def test_every_option_matches_fp64() -> None:
    options = {"objective": EVERYTHING, "extras": True, "temperature": 0.7, "device": "cuda"}
    check_head(make_case(300, 64, 2000, padded=2048, **options))


def test_ragged_vocabulary_and_all_masked() -> None:
    check_head(make_case(77, 64, 1021, device="cuda"))
    got = make_case(50, 64, 1021, masked=1.1, device="cuda").run()
    assert got.output.loss == 0 and not got.d_hidden.any() and not got.d_weight.any()


def test_first_ratio_is_one_and_bits_repeat() -> None:
    case = make_case(3000, 256, 20_000, padded=20_480, dtype=torch.bfloat16, device="cuda")
    options = {"temperature": 1.0, "vocab_size": 20_000, "chunk_tokens": 512}
    rows = case.loss_weights.nonzero()[:, 0]
    old, *_ = token_logprobs(case.hidden, case.weight, case.targets, rows=rows, **options)
    case.kwargs["logprobs_old"] = old
    first, second = case.run(chunk_tokens=512), case.run(chunk_tokens=512)
    assert first.output.ratio_max_error == 0.0
    first.assert_equal(second)


def test_virtual_shards_equal_real_shards() -> None:
    """One product per eighth of the vocabulary: what a TP 8 rank computes is one of the eight."""
    torch.manual_seed(0)
    rows, size = 300, 1024
    logits = torch.randn(rows, 8 * size, device="cuda") * 3
    targets = torch.randint(0, 8 * size, (rows,), device="cuda")

    def stats(columns: slice, num_local: int, first: int) -> torch.Tensor:
        shards = VocabShards(
            size=size, num_local=num_local, num_total=8, first=first, vocab_size=8 * size - 100
        )
        part = logits[:, columns].clone()
        return row_stats(Tile(logits=part, targets=targets, shards=shards, temperature=0.9))

    whole = stats(slice(None), 8, 0)
    parts = [stats(slice(i * size, (i + 1) * size), 1, i) for i in range(8)]
    assert torch.equal(whole, torch.cat(parts))


def test_more_elements_than_32_bits() -> None:
    """The last rows of a tile of 2.4e9 logits; a 32-bit offset would read the first ones."""
    rows, columns = 16_000, 152_064
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of GPU memory")
    logits = torch.zeros(rows, columns, device="cuda")
    logits[-1].copy_(torch.randn(columns, device="cuda"))
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    shards = VocabShards(size=columns // 8, num_local=8, num_total=8, first=0, vocab_size=columns)
    stats = row_stats(Tile(logits=logits, targets=targets, shards=shards, temperature=1.0))
    _, _, logprobs, _ = merge_stats(stats)
    expected = logits[-1].double().log_softmax(0)[0]
    assert abs(logprobs[-1].item() - expected.item()) <= 4e-6


def test_no_sync_when_rows_are_known() -> None:
    case = make_case(500, 64, 1000, padded=1024, dtype=torch.bfloat16, device="cuda")
    rows = case.loss_weights.nonzero()[:, 0]
    case.run(rows=rows, check_inputs=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
        options = case.kwargs | {"rows": rows, "check_inputs": False}
        policy_head_loss(hidden, weight, case.targets, **options).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.skipif(BOUND is None, reason="the bounds are an H100's and an H200's")
@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_speed_against_the_bare_products(tensor_parallel: int) -> None:
    """For Qwen2.5-32B whole and for a rank of TP 8: one shard, in the whole's blocks and tiles."""
    shape = HeadShape(
        num_tokens=20_480,
        hidden_size=5120,
        vocab_size=152_064 // tensor_parallel,
        dtype=torch.bfloat16,
        tensor_parallel=tensor_parallel,
    )
    results = bench_head(shape, torch.device("cuda"), only=["none of the baselines"], repeats=20)
    ratios = {r.name: r.ratio_to_products for r in results if r.absent is None}
    assert ratios[PRODUCTS] == 1.0 and ratios["megadapo"] <= BOUND, ratios


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_matches_fp64(dtype: torch.dtype, in_forward: bool) -> None:
    """Two micro-batches, each in blocks that are added up, or with a scale that is part of it."""
    case = make_case(500, 64, 2000, padded=2048, dtype=dtype, device="cuda")
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    scale = 1.0 if in_forward else 2.0
    options = {"chunk_tokens": 128, "tp_invariant": False, "accumulate_in_forward": in_forward}
    for _ in range(2):
        loss = policy_head_loss(hidden, weight, case.targets, **case.kwargs, **options).loss
        (loss * scale).backward()
    expected = case.definition(2.0 * scale)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 2e-6
    assert relative_error(hidden.grad, expected.d_hidden) <= tolerance
    assert relative_error(weight.main_grad, expected.d_weight) <= tolerance


@pytest.mark.slow
@pytest.mark.skipif("H200" not in CARD, reason="needs an H200's memory")
def test_memory_at_64k_tokens() -> None:
    """Under 4 GiB beside the fp32 gradient of the weight."""
    shape = HeadShape(num_tokens=65_536, hidden_size=5120, vocab_size=152_064, dtype=torch.bfloat16)
    inputs = make_inputs(shape, torch.device("cuda"))
    inputs.weight.main_grad = torch.zeros_like(inputs.weight, dtype=torch.float32)
    inputs.weight.grad_added_to_main_grad = False
    fp32_gradient_mib = 4 * inputs.weight.numel() / 2**20
    extra_mib = peak_extra_mib(lambda: loss_step(ours, inputs), torch.device("cuda"))
    assert extra_mib <= 4 * 1024 + fp32_gradient_mib
