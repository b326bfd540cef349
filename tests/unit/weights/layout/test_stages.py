"""The layers of each stage and chunk, written out: one layer off would train another model."""

from __future__ import annotations

import pytest

from megadapo.errors import WeightError
from megadapo.weights.layout.stages import stage_chunks, stage_layers


def test_stages_are_even_where_nothing_else_is_said() -> None:
    """One chunk per stage: two by default would send every second quarter elsewhere."""
    assert stage_chunks(4, pp_size=2) == [[range(0, 2)], [range(2, 4)]]
    assert stage_layers(4, pp_size=2) == [(0, 1), (2, 3)]
    assert stage_layers(2, pp_size=2) == [(0,), (1,)]


def test_chunks_go_round_the_stages() -> None:
    """Catches a stage that gets its chunks one after the other in the model."""
    first, second = stage_chunks(8, pp_size=2, vpp_size=2)
    assert first == [range(0, 2), range(4, 6)]
    assert second == [range(2, 4), range(6, 8)]
    assert stage_layers(8, pp_size=2, vpp_size=2) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_what_is_left_over_goes_to_the_first_chunks_of_the_model() -> None:
    """Catches a layer that is lost, doubled, or given to the last chunks."""
    assert stage_layers(6, pp_size=4) == [(0, 1), (2, 3), (4,), (5,)]
    assert stage_layers(7, pp_size=2, vpp_size=2) == [(0, 1, 4, 5), (2, 3, 6)]


@pytest.mark.parametrize(
    ("num_layers", "split", "sizes"),
    [
        (9, {"pp_size": 4, "first": 2, "last": 1}, [2, 3, 3, 1]),
        (9, {"pp_size": 4, "first": 1, "last": 1}, [1, 4, 3, 1]),
        (9, {"pp_size": 3, "first": 1}, [1, 4, 4]),
        (9, {"pp_size": 3, "last": 1}, [4, 4, 1]),
        (5, {"pp_size": 2, "first": 2, "last": 3}, [2, 3]),
        (10, {"pp_size": 3, "vpp_size": 2, "first": 2, "last": 4}, [2, 4, 4]),
    ],
)
def test_the_ends_have_what_they_are_given(
    num_layers: int, split: dict[str, int], sizes: list[int]
) -> None:
    """What they are given is all chunks of a stage together, not each of them."""
    stages = stage_layers(num_layers, **split)
    assert [len(stage) for stage in stages] == sizes
    assert sorted(layer for stage in stages for layer in stage) == list(range(num_layers))


@pytest.mark.parametrize("num_layers", [0, 3])
def test_a_chunk_without_layers_is_refused(num_layers: int) -> None:
    """A stage that holds nothing would wait for activations that never come."""
    message = f"^{num_layers} layers cannot be spread over 2 stages of 2 chunks"
    with pytest.raises(WeightError, match=message):
        stage_chunks(num_layers, pp_size=2, vpp_size=2)
