"""Micro-batches: nothing lost, nothing over budget, ranks in step, sequences cut for context."""

import random

import numpy as np
import pytest

from megadapo.trainer.batch.mini_batch import balance, first_fit, partition, sequence_cost
from megadapo.trainer.batch.packing import WHOLE_SEQUENCES, ContextPart

LENGTHS = [24, 0, 12, 36]


def random_case(seed: int) -> tuple[list[int], int, int]:
    rng = random.Random(seed)
    lengths = [
        rng.choice([1, 2, 7, 40, 300, 900]) + rng.randrange(9) for _ in range(rng.randrange(60))
    ]
    return lengths, rng.randrange(1, 9), rng.choice([1, 64, 400, 4096])


@pytest.mark.parametrize("seed", range(40))
def test_any_case_loses_nothing_and_keeps_ranks_in_step(seed):
    """A rank with fewer micro-batches would leave the collectives of the others waiting."""
    lengths, num_ranks, budget = random_case(seed)
    sizes = {"num_ranks": num_ranks, "token_budget": budget, "hidden_size": 64}
    needed = len(partition(lengths, **sizes)[0])
    for multiple_of in (1, 3):
        shares = partition(lengths, **sizes, multiple_of=multiple_of)
        assert len(shares) == num_ranks
        (count,) = {len(rank) for rank in shares}
        assert count % multiple_of == 0 and 1 <= needed <= count < needed + multiple_of
        parts = [members for rank in shares for members in rank]
        assert sorted(i for members in parts for i in members) == list(range(len(lengths)))
        for members in parts:
            # only a sequence that is alone may exceed the budget
            assert len(members) <= 1 or sum(lengths[i] for i in members) <= budget
        assert partition(list(lengths), **sizes, multiple_of=multiple_of) == shares


def test_without_sequences_each_rank_has_an_empty_micro_batch():
    assert partition([], num_ranks=2, token_budget=8, hidden_size=4) == [[[]], [[]]]


def test_ranks_get_even_cost_with_one_long_sequence():
    """Balanced by count, rank 0 would get the long sequence and half of the others."""
    lengths = [1000] + [100] * 10
    costs = [sequence_cost(length, 4096) for length in lengths]
    shares = balance(range(11), costs, 2)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) < 1.05 * min(loads)
    assert [0] in shares


def test_attention_costs_as_much_as_matrices_at_12_hidden_sizes():
    """The weight of the two parts decides what an even share is."""
    assert sequence_cost(12 * 64, 64) == 2 * 12 * 64
    assert sequence_cost(10, 8192) == pytest.approx(10, rel=1e-3)


def test_most_expensive_items_go_first():
    """In their own order the last, long one would come on top of half of the others."""
    assert balance(range(5), [1.0, 1.0, 1.0, 1.0, 4.0], 2) == [[4], [0, 1, 2, 3]]
    assert first_fit(range(4), [30, 30, 50, 50], 80) == [[0, 2], [1, 3]]


def test_micro_batch_may_be_full_and_one_sequence_may_exceed_it():
    """In both the even split holds; the tight packing, which would come else, is another."""
    sizes = {"num_ranks": 1, "token_budget": 60, "hidden_size": 4096, "multiple_of": 3}
    assert partition([30, 30, 30, 30], **sizes) == [[[0, 3], [1], [2]]]
    assert partition([90, 30, 20, 10, 5], **sizes) == [[[0], [1], [2, 3, 4]]]


def test_packing_keeps_the_bound_of_first_fit_decreasing():
    rng = random.Random(0)
    lengths = [rng.randrange(1, 101) for _ in range(200)]
    bins = first_fit(range(200), lengths, 100)
    assert len(bins) <= 11 / 9 * (sum(lengths) / 100) + 2


def test_micro_batches_are_balanced_within_the_budget():
    """First-fit leaves one full and one nearly empty; pipeline stages would wait for it."""
    shares = partition([50, 30, 10, 10, 5], num_ranks=1, token_budget=100, hidden_size=4096)
    tokens = sorted(sum([50, 30, 10, 10, 5][i] for i in members) for members in shares[0])
    assert tokens == [50, 55]


def test_balanced_split_above_the_budget_is_rejected():
    """60 + 60 tokens fit; dearest first to the lightest bin would give 70 and 50."""
    shares = partition([30, 30, 20, 20, 20], num_ranks=1, token_budget=60, hidden_size=4096)
    assert shares == [[[0, 1], [2, 3, 4]]]


def test_tight_packing_is_padded_with_empty_micro_batches():
    """Attention makes the seven long ones so dear that all short ones would share one, 70 long."""
    lengths = [50] * 7 + [10] * 7
    (share,) = partition(lengths, num_ranks=1, token_budget=60, hidden_size=1, multiple_of=2)
    assert share == [[index, index + 7] for index in range(7)] + [[]]


def parts(size: int) -> list[np.ndarray]:
    return [ContextPart(rank, size).places(LENGTHS) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_tokens_are_divided_evenly_over_ranks(size):
    found = parts(size)
    assert sorted(np.concatenate(found).tolist()) == list(range(sum(LENGTHS)))
    assert {len(places) for places in found} == {sum(LENGTHS) // size}
    assert all((np.diff(places) > 0).all() for places in found)


def test_chunks_equal_transformer_engines():
    """Its attention and Megatron's rotary embedding compute positions from the rank alone."""
    assert ContextPart(0, 2).places([8, 4]).tolist() == [0, 1, 6, 7, 8, 11]
    assert ContextPart(1, 2).places([8, 4]).tolist() == [2, 3, 4, 5, 9, 10]
    assert WHOLE_SEQUENCES.places([3, 2]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_all_ranks_attend_to_as_much(size):
    position = np.concatenate([np.arange(length) for length in LENGTHS])
    work = [int((position[places] + 1).sum()) for places in parts(size)]
    assert len(set(work)) == 1


def test_no_sequences_leave_no_tokens():
    assert ContextPart(1, 2).places([]).tolist() == [] == WHOLE_SEQUENCES.places([]).tolist()
