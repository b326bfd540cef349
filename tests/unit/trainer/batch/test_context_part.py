"""The tokens of a sequence on each context-parallel rank, in Transformer Engine's order."""

import numpy as np
import pytest

from megadapo.trainer.batch.packing import WHOLE_SEQUENCES, ContextPart

LENGTHS = [24, 0, 12, 36]


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
