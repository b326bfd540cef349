"""Which rank stands where, written out: a rank that is off by one trains another's slice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megadapo.errors import WeightError
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.layout.shards import ShardPosition
from tests.support.weights.tiny_layouts import layout_of


def test_every_rank_of_a_replica_knows_its_place() -> None:
    """In Megatron's order: TP fastest, then DP with EP, then PP."""
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


def test_stages_are_cut_as_asked() -> None:
    layout = layout_of(num_hidden_layers=4)
    stages = [(0,), (1, 2, 3)]
    found = replica_positions(layout, pp_size=2, stages=stages)
    assert [position.layer_indices for position in found] == stages
    interleaved = replica_positions(layout, pp_size=2, vpp_size=2)
    assert [position.layer_indices for position in interleaved] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("tp_size", "TP"),
        ("pp_size", "PP"),
        ("vpp_size", "VPP"),
        ("ep_size", "EP"),
        ("num_dp", "DP"),
    ],
)
def test_a_size_of_zero_is_refused_by_its_name(size: str, name: str) -> None:
    with pytest.raises(WeightError, match=f"^{name} must be at least 1, but it is 0"):
        replica_positions(layout_of(), **{size: 0})


def test_experts_that_do_not_fit_the_ranks_are_refused() -> None:
    message = (
        r"^2 ranks of a pipeline stage \(TP 2 x DP 1\) cannot be cut into expert TP 2 x EP 2\.$"
    )
    with pytest.raises(WeightError, match=message):
        replica_positions(layout_of("Qwen3Moe"), tp_size=2, ep_size=2)


def test_experts_are_cut_as_the_rest_unless_both_numbers_say_otherwise() -> None:
    position = ShardPosition(layer_indices=(), tp_rank=1, tp_size=4)
    assert position.expert_tp == (1, 4)
    assert replace(position, etp_rank=0).expert_tp == (1, 4)
    assert replace(position, etp_size=2).expert_tp == (1, 4)
    assert replace(position, etp_rank=0, etp_size=2).expert_tp == (0, 2)
