"""Attention of packed sequences in C against fp64, with every gradient."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megadapo.kernels.attention import (
    LONGEST,
    packed_attention,
    packed_attention_definition,
    should_use_packed_attention,
)
from megadapo.kernels.cpu import native


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def tensors(num_tokens: int, heads: int, groups: int, size: int) -> list[Tensor]:
    """Return query, key and value as in the trainer: the value is a slice of a wider product."""
    mixed = torch.randn(num_tokens, groups, 3 * size)
    query, key = torch.randn(num_tokens, heads, size), torch.randn(num_tokens, groups, size)
    return [query, key, mixed[..., size : 2 * size]]


def values_and_grads(attend, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("heads, groups, size", [(4, 2, 32), (3, 1, 20), (2, 2, 8), (6, 2, 65)])
@pytest.mark.parametrize(
    "lengths",
    [[1], [1, 2, 3, 4, 5, 17, 40], [16, 33, 7], [8] * 9, [LONGEST, 3], [0, 5, 0]],
    ids=str,
)
def test_packed_attention_matches_fp64(lengths, heads, groups, size):
    """Lengths around those of registers, and heads that fill none."""
    torch.manual_seed(0)
    inputs = tensors(sum(lengths), heads, groups, size)
    starts, longest = starts_of(lengths), max(lengths, default=0)
    upstream = torch.randn(sum(lengths), heads, size)
    assert should_use_packed_attention(*inputs, longest)
    got = values_and_grads(
        lambda *x: packed_attention(*x, starts, longest=longest), inputs, upstream
    )
    expected = values_and_grads(
        lambda *x: packed_attention_definition(*x, starts),
        [x.double() for x in inputs],
        upstream.double(),
    )
    for value, truth in zip(got, expected, strict=True):
        assert value.shape == truth.shape
        # a query that reads one key has a gradient of 0, which rounding is not measured against
        assert (value.double() - truth).norm() <= 2e-6 * max(truth.norm(), upstream.norm())


def test_no_tokens_at_all():
    inputs = [x.requires_grad_() for x in tensors(0, 4, 2, 16)]
    for starts in (starts_of([]), starts_of([0])):
        out = packed_attention(*inputs, starts, longest=0)
        assert out.shape == (0, 4, 16)
        assert [x.shape for x in torch.autograd.grad(out.sum(), inputs)] == [
            x.shape for x in inputs
        ]


def test_scale_argument():
    torch.manual_seed(0)
    inputs, starts = tensors(9, 2, 1, 16), starts_of([4, 5])
    got = packed_attention(*inputs, starts, longest=5, scale=0.7)
    torch.testing.assert_close(got, packed_attention_definition(*inputs, starts, scale=0.7))
    assert not torch.allclose(got, packed_attention(*inputs, starts, longest=5))


def test_sequence_bits_do_not_depend_on_batch_or_threads(set_threads):
    """Otherwise a token's log-prob would depend on the rest of its batch."""
    torch.manual_seed(0)
    lengths = [5, 40, 13, 64]
    inputs, starts = tensors(sum(lengths), 4, 2, 32), starts_of(lengths)
    upstream = torch.randn(sum(lengths), 4, 32)
    whole = values_and_grads(lambda *x: packed_attention(*x, starts, longest=64), inputs, upstream)
    set_threads(1)
    for start, stop in pairwise(starts.tolist()):
        alone = values_and_grads(
            lambda *x, n=stop - start: packed_attention(*x, starts_of([n]), longest=n),
            [x[start:stop] for x in inputs],
            upstream[start:stop],
        )
        for part, together in zip(alone, whole, strict=True):
            assert torch.equal(part, together[start:stop])


def test_large_and_non_finite_scores():
    torch.manual_seed(0)
    query, key, value = tensors(12, 2, 2, 16)
    starts = starts_of([6, 6])
    loud = packed_attention(query * 300, key * 300, value, starts, longest=6)
    truth = packed_attention_definition(
        *(x.double() for x in (query * 300, key * 300, value)), starts
    )
    assert loud.isfinite().all()
    assert (loud.double() - truth).abs().max() < 1e-2
    key[2, 0, 3] = torch.nan
    out = packed_attention(query, key, value, starts, longest=6)
    reads_it = torch.zeros(12, 2, dtype=torch.bool)
    reads_it[2:6, 0] = True
    assert torch.equal(out.isnan().any(-1), reads_it)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"longest": 3}, "at most 3"),
        ({"cu_seqlens": starts_of([4, 4])}, "cut 9 tokens"),
        ({"cu_seqlens": torch.tensor([0, 6, 4, 9], dtype=torch.int32)}, "cut 9 tokens"),
        ({"cu_seqlens": torch.tensor([0, 4, 9])}, "int32"),
        ({"key": torch.zeros(9, 1, 8)}, "do not fit"),
        ({"query": torch.zeros(8, 2, 16)}, "do not fit"),
        ({"scale": 0.0}, "positive"),
    ],
    ids=str,
)
def test_out_of_range_arguments_are_rejected(change, message):
    query, key, value = tensors(9, 2, 1, 16)
    arguments = {"query": query, "key": key, "value": value, "cu_seqlens": starts_of([4, 5])}
    with pytest.raises(ValueError, match=message):
        packed_attention(**(arguments | {"longest": 5} | change))


def test_unsupported_inputs(monkeypatch, fresh_native):
    inputs = tensors(4, 2, 1, 16)
    assert not should_use_packed_attention(*inputs, LONGEST + 1)
    assert not should_use_packed_attention(*(x.bfloat16() for x in inputs), 4)
    monkeypatch.setenv(native.SWITCH, "0")
    native.load_native.cache_clear()
    assert not should_use_packed_attention(*inputs, 4)
