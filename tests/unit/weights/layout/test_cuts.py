"""Cuts compared with results worked out by hand."""

import pytest

from megadapo.errors import WeightError
from megadapo.weights.layout.cuts import (
    Span,
    clip,
    cut_each,
    cut_evenly,
    cut_heads,
    cut_padded,
    interleave_groups,
    round_up,
    whole,
)

AB = [Span("a", 10, 16), Span("b", 0, 4)]
"""Ten rows end to end; the first span starts inside its tensor."""


def test_part_may_span_two_tensors():
    assert cut_evenly(AB, 0, 2) == [Span("a", 10, 15)]
    assert cut_evenly(AB, 1, 2) == [Span("a", 15, 16), Span("b", 0, 4)]
    assert cut_evenly(AB, 2, 5) == [Span("a", 14, 16)]
    with pytest.raises(WeightError, match=r"^a, b: 10 cannot be cut into 3 equal parts\.$"):
        cut_evenly([AB[0], Span("b", 0, 2), Span("b", 2, 4)], 0, 3)


def test_clip_excludes_adjacent_spans():
    assert clip(AB, 6, 6) == clip(AB, 10, 12) == []
    assert clip(AB, 0, 6) == AB[:1]
    assert clip(AB, 6, 99) == AB[1:]
    assert clip(AB, 5, 7) == [Span("a", 15, 16), Span("b", 0, 1)]


def test_cut_each_cuts_every_tensor_separately():
    assert whole(["a", "b"], [6, 4]) == [Span("a", 0, 6), Span("b", 0, 4)]
    assert cut_each(["a", "b"], [6, 4], 1, 2) == [Span("a", 3, 6), Span("b", 2, 4)]


def test_query_groups_keep_their_key_and_value():
    """Two groups of 4 q rows, 2 k rows and 2 v rows; four parts cut the groups."""
    sizes = ["q", "k", "v"], [8, 4, 4]
    second = [Span("q", 4, 8), Span("k", 2, 4), Span("v", 2, 4)]
    assert interleave_groups(*sizes, 2, 1, 2) == second
    assert interleave_groups(*sizes, 2, 2, 4) == second[:1]
    assert interleave_groups(*sizes, 2, 3, 4) == second[1:]


def test_heads_are_cut_or_repeated():
    """With fewer heads than ranks, neighbouring ranks share a head."""
    assert [cut_heads("k", 12, 4, rank, 4) for rank in (0, 3)] == [
        [Span("k", 0, 3)],
        [Span("k", 9, 12)],
    ]
    assert cut_heads("k", 12, 4, 1, 2) == [Span("k", 6, 12)]
    repeated = [cut_heads("k", 6, 2, rank, 4) for rank in range(4)]
    assert repeated == [[Span("k", 0, 3)]] * 2 + [[Span("k", 3, 6)]] * 2
    with pytest.raises(WeightError, match=r"^k: 2 KV heads do not divide 3 engine ranks\.$"):
        cut_heads("k", 6, 2, 0, 3)


def test_padding_is_in_no_span():
    parts = [cut_padded("e", 10, 16, rank, 4) for rank in range(4)]
    assert parts == [[Span("e", 0, 4)], [Span("e", 4, 8)], [Span("e", 8, 10)], []]
    assert cut_padded("e", 16, 16, 1, 2) == [Span("e", 8, 16)]
    for padded, size in ((15, 2), (8, 2)):
        message = rf"^e: 10 rows padded to {padded} cannot be cut into {size} parts\.$"
        with pytest.raises(WeightError, match=message):
            cut_padded("e", 10, padded, 0, size)


def test_bounds_are_integers():
    """A float would equal its integer in these tests, but cannot slice a tensor."""
    spans = [
        *cut_evenly(AB, 1, 2),
        *interleave_groups(["q", "k", "v"], [8, 4, 4], 2, 1, 2),
        *cut_heads("k", 6, 2, 1, 4),
        *(span for rank in range(3) for span in cut_padded("e", 10, 16, rank, 4)),
    ]
    assert all(type(bound) is int for span in spans for bound in (span.start, span.stop))


@pytest.mark.parametrize("value, rounded", [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_round_up(value, rounded):
    assert round_up(value, 64) == rounded
