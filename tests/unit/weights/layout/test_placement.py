"""Positions of ranks and layers of stages, compared with results written out by hand."""

import itertools
from dataclasses import replace

import pytest

from megadapo.errors import WeightError
from megadapo.weights.layout.placement import replica_positions, stage_chunks, stage_layers
from megadapo.weights.layout.shards import ShardPosition
from tests.support.weights.tiny_layouts import layout_of


def test_positions_of_all_ranks():
    """Ranks are in Megatron's order: TP fastest, then DP with EP, then PP."""
    layout = layout_of("Qwen3Moe", num_hidden_layers=3)
    found = replica_positions(layout, tp_size=2, pp_size=2, ep_size=2, etp_size=1, num_dp=2)
    assert found == [
        ShardPosition(
            tp_rank=tp_rank,
            tp_size=2,
            pp_rank=stage,
            pp_size=2,
            layer_indices=layers,
            has_embedding=stage == 0,
            has_head=stage == 1,
            ep_rank=ep_rank,
            ep_size=2,
            etp_rank=0,
            etp_size=1,
            padded_vocab_size=128,
        )
        for stage, layers in enumerate([(0, 1), (2,)])
        for tp_rank, ep_rank in [(0, 0), (1, 1), (0, 0), (1, 1)]
    ]
    experts = replica_positions(layout, tp_size=2, ep_size=2, num_dp=2)
    assert [(one.ep_rank, one.expert_tp) for one in experts] == [
        *((0, (0, 2)), (0, (1, 2)), (1, (0, 2)), (1, (1, 2)))
    ]


def test_given_stages_are_used():
    layout = layout_of(num_hidden_layers=4)
    stages = [(0,), (1, 2, 3)]
    found = replica_positions(layout, pp_size=2, stages=stages)
    assert [position.layer_indices for position in found] == stages
    interleaved = replica_positions(layout, pp_size=2, vpp_size=2)
    assert [position.layer_indices for position in interleaved] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "vpp_size", "ep_size", "num_dp"])
def test_size_of_zero_is_rejected_by_name(size):
    name = size.removesuffix("_size").removeprefix("num_").upper()
    with pytest.raises(WeightError, match=f"^{name} must be at least 1, but it is 0"):
        replica_positions(layout_of(), **{size: 0})


def test_experts_that_do_not_fit_the_ranks_are_rejected():
    message = (
        r"^2 ranks of a pipeline stage \(TP 2 x DP 1\) cannot be cut into expert TP 2 x EP 2\.$"
    )
    with pytest.raises(WeightError, match=message):
        replica_positions(layout_of("Qwen3Moe"), tp_size=2, ep_size=2)


def test_expert_tp_defaults_to_tp():
    position = ShardPosition(layer_indices=(), tp_rank=1, tp_size=4)
    assert position.expert_tp == (1, 4)
    assert replace(position, etp_rank=0).expert_tp == (1, 4)
    assert replace(position, etp_size=2).expert_tp == (1, 4)
    assert replace(position, etp_rank=0, etp_size=2).expert_tp == (0, 2)


def test_chunks_alternate_between_stages():
    assert stage_chunks(4, pp_size=2) == [[range(0, 2)], [range(2, 4)]]
    first, second = stage_chunks(8, pp_size=2, vpp_size=2)
    assert first == [range(0, 2), range(4, 6)]
    assert second == [range(2, 4), range(6, 8)]
    assert stage_layers(8, pp_size=2, vpp_size=2) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_remaining_layers_go_to_first_chunks():
    assert stage_layers(6, pp_size=4) == [(0, 1), (2, 3), (4,), (5,)]
    assert stage_layers(7, pp_size=2, vpp_size=2) == [(0, 1, 4, 5), (2, 3, 6)]
    for layers in range(4, 20):
        for pp_size, vpp_size in itertools.product((1, 2, 3, 4), (1, 2)):
            if pp_size * vpp_size <= layers:
                stages = stage_layers(layers, pp_size=pp_size, vpp_size=vpp_size)
                assert sorted(itertools.chain(*stages)) == list(range(layers))


@pytest.mark.parametrize(
    ("num_layers", "split", "sizes"),
    [
        (9, {"pp_size": 4, "first": 2, "last": 1}, [2, 3, 3, 1]),
        (9, {"pp_size": 4, "first": 1, "last": 1}, [1, 4, 3, 1]),
        (9, {"pp_size": 3, "first": 1}, [1, 4, 4]),
        (9, {"pp_size": 3, "last": 1}, [4, 4, 1]),
        (5, {"pp_size": 2, "first": 2, "last": 3}, [2, 3]),
        (3, {"pp_size": 1}, [3]),
        (28, {"pp_size": 2, "last": 12}, [16, 12]),
        (6, {"pp_size": 2, "vpp_size": 2, "last": 2}, [4, 2]),
        (5, {"pp_size": 3, "first": 1, "last": 1}, [1, 3, 1]),
        (10, {"pp_size": 3, "vpp_size": 2, "first": 2, "last": 4}, [2, 4, 4]),
    ],
)
def test_first_and_last_stage_have_given_layers(num_layers, split, sizes):
    """The given number counts all chunks of a stage together."""
    stages = stage_layers(num_layers, **split)
    assert [len(stage) for stage in stages] == sizes
    assert sorted(layer for stage in stages for layer in stage) == list(range(num_layers))


@pytest.mark.parametrize("num_layers", [0, 3])
def test_chunk_without_layers_is_rejected(num_layers):
    """An empty stage would wait for activations forever."""
    message = f"^{num_layers} layers cannot be spread over 2 stages of 2 chunks"
    with pytest.raises(WeightError, match=message):
        stage_chunks(num_layers, pp_size=2, vpp_size=2)
