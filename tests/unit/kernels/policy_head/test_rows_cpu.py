"""The CPU's row passes, compiled and in torch, against fp64 at the sizes where loops have ends."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megadapo.kernels.cpu import native
from megadapo.kernels.policy_head.blocks import merge_stats
from megadapo.kernels.policy_head.rows_cpu import SOURCE, RowGradients, row_grads_cpu, row_stats_cpu
from megadapo.kernels.policy_head.tiles import MASKED_LOGIT, Tile, VocabShards


def shards_of(columns: int, *, num_local: int = 1, first: int = 0, vocab_size: int | None = None):
    size = columns // num_local
    total = first + num_local
    return VocabShards(
        size=size,
        num_local=num_local,
        num_total=total,
        first=first,
        vocab_size=total * size if vocab_size is None else vocab_size,
    )


def run(
    logits, targets, shards, *, temperature=1.0, d_logprobs=None, d_entropy=None, dtype=None,
    in_place=False,
):  # fmt: skip
    """Return log-probs, entropy and d_logits of a tile of the whole vocabulary."""
    tile = Tile(logits=logits, targets=targets, shards=shards, temperature=temperature)
    stats = row_stats_cpu(tile)
    merged = merge_stats(stats)
    terms = RowGradients(
        maximum=merged.maximum,
        log_total=merged.log_total,
        entropy=merged.entropy,
        d_logprobs=torch.ones_like(merged.logprobs) if d_logprobs is None else d_logprobs,
        d_entropy=d_entropy,
    )
    d_logits = logits if in_place else torch.empty_like(logits, dtype=dtype)
    row_grads_cpu(tile, terms, d_logits)
    return merged.logprobs, merged.entropy, d_logits, merged.distance


def truth(logits, targets, num_valid, *, temperature=1.0, d_logprobs=None, d_entropy=None):
    d_logprobs = torch.ones(len(logits)) if d_logprobs is None else d_logprobs
    d_entropy = torch.zeros(len(logits)) if d_entropy is None else d_entropy
    log_p = (logits.double()[:, :num_valid] / temperature).log_softmax(-1)
    p = log_p.exp()
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -torch.special.xlogy(p, p).sum(-1)
    through_entropy = torch.special.xlogy(p, p) + p * entropy[:, None]
    grads = -p * d_logprobs.double()[:, None] - through_entropy * d_entropy.double()[:, None]
    grads.scatter_add_(1, targets[:, None], d_logprobs.double()[:, None])
    padding = grads.new_zeros(len(grads), logits.shape[1] - num_valid)
    distance = (torch.nn.functional.one_hot(targets, num_valid) - p).norm(dim=1)
    return logprobs, entropy, torch.cat([grads / temperature, padding], dim=1), distance


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 130, 2047, 2049, 6145])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_row_lengths_match_fp64(passes, columns, temperature):
    torch.manual_seed(0)  # one draw in a thousand has a gradient of nothing but cancellation
    rows = 5
    logits = torch.randn(rows, columns) * 4.0
    targets = torch.arange(rows) * 7 % columns
    options = {"d_logprobs": torch.randn(rows), "d_entropy": torch.randn(rows)}
    options["temperature"] = temperature
    got = run(logits, targets, shards_of(columns), **options)
    expected = truth(logits, targets, columns, **options)
    for value, exact in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=0, atol=5e-6)
    assert (got[2].double() - expected[2]).norm() <= 2e-6 * expected[2].norm() + 1e-9
    torch.testing.assert_close(got[3].double(), expected[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
@pytest.mark.parametrize("shift", [-1e5, 0.0])
def test_peaked_flat_and_very_negative_rows(passes, scale, shift):
    """Exponentials that overflow, vanish or lose their digits behind a large common term."""
    logits = torch.randn(4, 1024) * scale + shift
    targets = logits.argmax(-1)
    got = run(logits, targets, shards_of(1024, num_local=8))
    expected = truth(logits, targets, 1024)
    assert got[2].isfinite().all()
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-6, atol=1e-5)
    assert (got[2].double() - expected[2]).abs().amax() <= 2e-6
    # a sum that holds the target's square would be wrong by 3e-4 where its probability is near 1
    torch.testing.assert_close(got[3].double(), expected[3], rtol=0, atol=1e-6)


def test_padding_never_enters_and_gets_no_gradient(passes):
    """Two shards of padding alone, one cut in two by the vocabulary's end."""
    logits = torch.randn(3, 256) * 3.0
    logits[:, 150:] = 50.0
    targets = torch.tensor([0, 149, 77])
    shards = shards_of(256, num_local=8, vocab_size=150)
    logprobs, entropy, d_logits, distance = run(logits, targets, shards)
    expected = truth(logits, targets, 150)
    torch.testing.assert_close(distance.double(), expected[3], rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=2e-6)
    assert (d_logits[:, 150:] == 0).all()
    torch.testing.assert_close(d_logits.double(), expected[2], rtol=0, atol=1e-6)


def test_targets_of_other_ranks_are_ignored(passes):
    shards = shards_of(128, first=1)
    logits = torch.randn(2, 128)
    targets = torch.tensor([5, 130])
    tile = Tile(logits=logits, targets=targets, shards=shards, temperature=1.0)
    stats = row_stats_cpu(tile)
    assert stats[0, 2, 0] == MASKED_LOGIT
    assert stats[0, 2, 1] == logits[1, 2]
    terms = RowGradients(
        maximum=stats[0, 0],
        log_total=stats[0, 1].log(),
        entropy=torch.zeros(2),
        d_logprobs=torch.ones(2),
        d_entropy=None,
    )
    d_logits = torch.empty_like(logits)
    row_grads_cpu(tile, terms, d_logits)
    expected = -logits.double().softmax(-1)
    expected[1, 2] += 1.0
    torch.testing.assert_close(d_logits.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_round_fp32_once(passes, dtype):
    logits = torch.randn(6, 1000) * 3.0
    targets = torch.randint(0, 1000, (6,))
    exact = run(logits.clone(), targets, shards_of(1000))[2]
    rounded = run(logits.clone(), targets, shards_of(1000), dtype=dtype)[2]
    assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7FC00001, 0x7FFFFFFF])
def test_nan_stays_in_its_row(passes, bits):
    """0 x NaN would carry one broken row into every weight; a NaN that looks finite, worse."""
    logits = torch.randn(3, 100)
    logits[1, 50] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    d_logprobs = torch.tensor([1.0, 0.0, -1.0])
    logprobs, entropy, d_logits, _ = run(
        logits, torch.tensor([1, 2, 3]), shards_of(100), d_logprobs=d_logprobs
    )
    assert logprobs[1].isnan() and entropy[1].isnan()
    assert logprobs[[0, 2]].isfinite().all()
    assert (d_logits[1] == 0).all() and d_logits.isfinite().all()


def test_minus_infinity_logits_have_zero_probability(passes):
    """Behind the ends of a row stand fillers, which must not count where nothing else does."""
    logits = torch.randn(3, 40)
    logits[0, ::2] = -torch.inf
    logits[1, 7] = -torch.inf
    logits[2] = -torch.inf
    targets = torch.tensor([1, 7, 0])
    d_logprobs = torch.tensor([1.0, 1.0, 0.0])
    logprobs, entropy, d_logits, _ = run(logits, targets, shards_of(40), d_logprobs=d_logprobs)
    expected = logits[0, 1::2].double().log_softmax(-1)
    assert logprobs[0].item() == pytest.approx(expected[0].item(), abs=1e-6)
    assert entropy[0].item() == pytest.approx(-(expected.exp() * expected).sum().item(), abs=1e-6)
    assert logprobs[1] <= MASKED_LOGIT and not logprobs[2].isfinite()
    assert d_logits.isfinite().all() and (d_logits[0, ::2] == 0).all()
    assert d_logits[1, 7] == 1.0


def test_gradient_may_overwrite_logits(passes):
    """With fp32 hidden states every logit must be read before it is overwritten."""
    logits, targets = torch.randn(5, 333) * 3.0, torch.randint(0, 333, (5,))
    apart = run(logits.clone(), targets, shards_of(333))[2]
    assert torch.equal(run(logits, targets, shards_of(333), in_place=True)[2], apart)


def test_row_bits_do_not_depend_on_tile_or_threads(passes, set_threads):
    """Otherwise the first ratio would not be exactly 1."""
    logits, targets = torch.randn(33, 4096) * 3.0, torch.randint(0, 4096, (33,))
    shards = shards_of(4096, num_local=8)

    def stats_of(part, shards):
        return row_stats_cpu(Tile(logits=part, targets=targets, shards=shards, temperature=1.0))

    stats = stats_of(logits, shards)
    whole = run(logits, targets, shards)
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 33)):
            parts = run(logits[rows].clone(), targets[rows], shards)
            assert all(torch.equal(a, b[rows]) for a, b in zip(parts, whole, strict=True))
    halves = [
        stats_of(half.contiguous(), shards_of(2048, num_local=4, first=first))
        for first, half in zip((0, 4), logits.split(2048, dim=1), strict=True)
    ]
    assert torch.equal(torch.cat(halves), stats)


# what these tests look at is the same without the compiler's long optimisations
QUICK = tuple("-O0" if flag == "-O3" else flag for flag in native._FLAGS)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch, fresh_native) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", QUICK)
    return tmp_path


def test_broken_compiler_warns_and_uses_torch(fresh_cache, monkeypatch, caplog):
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING):
        assert native.load_native(SOURCE) is None
    assert "policy_head_rows.c was not compiled" in caplog.text
    assert list(fresh_cache.rglob("*.so")) == []


def compile_in_a_process() -> subprocess.Popen:
    program = (
        "from megadapo.kernels.cpu import native\n"
        "from megadapo.kernels.policy_head.rows_cpu import SOURCE\n"
        f"native._FLAGS = {QUICK}\n"
        "assert native.load_native(SOURCE).megadapo_row_stats\n"
    )
    return subprocess.Popen([sys.executable, "-c", program])


@pytest.mark.slow
def test_concurrent_processes_share_one_library(fresh_cache):
    """Ranks start together, on an empty cache; none may find half a file."""
    started = [compile_in_a_process() for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    (library,) = fresh_cache.rglob("*.so")
    made = library.stat().st_mtime_ns
    assert native.load_native(SOURCE) is not None
    assert library.stat().st_mtime_ns == made, "it was there already"
    assert [path for path in library.parent.iterdir() if path != library] == []


def test_damaged_library_is_recompiled(fresh_cache):
    """A power loss after the rename leaves a file without its bytes."""
    assert compile_in_a_process().wait(timeout=120) == 0
    (library,) = fresh_cache.rglob("*.so")
    library.write_bytes(b"")
    assert native.load_native(SOURCE) is not None
    assert library.stat().st_size > 0


def test_folder_writable_by_others_is_not_used(fresh_cache):
    """Another user with write access could inject code into every run."""
    folder = fresh_cache / "megadapo" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert native.load_native(SOURCE) is not None
    assert list(folder.iterdir()) == []


def test_user_without_home(fresh_cache, monkeypatch):
    """Containers run under numbers that no passwd file knows."""
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert native.load_native(SOURCE) is not None


def test_unreadable_compiler_command_is_ignored(monkeypatch):
    monkeypatch.setenv("CC", 'gcc "x')
    assert native.find_compiler() == ["gcc"]
