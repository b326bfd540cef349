"""Positions and shards of trainer and engine ranks, compared with results written out by hand."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from megadapo.errors import WeightError
from megadapo.weights.layout.cuts import Span
from megadapo.weights.layout.layout import ModelLayout, hf_names, layout_for
from megadapo.weights.layout.placement import joined_chunks, replica_positions, stage_chunks
from megadapo.weights.layout.shards import EnginePosition, Shard, ShardPosition

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 70,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 6,
    "num_experts": 4,
}
"""Sizes of the smallest layouts that can be split."""
ALL_NAMES = (
    "model.embed_tokens.weight",
    *("model.layers.0." + name for name in (
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    )),
    "model.norm.weight",
    "lm_head.weight",
)  # fmt: skip

TRAINER_RANK_1_OF_2 = """\
embedding.word_embeddings.weight (64, 8): model.embed_tokens.weight[64:70]
decoder.layers.0.input_layernorm.weight or decoder.layers.0.self_attention.linear_qkv.layer_norm_weight (8,): .input_layernorm.weight[0:8]
decoder.layers.0.self_attention.linear_qkv.weight (8, 8): .self_attn.q_proj.weight[4:8] .self_attn.k_proj.weight[2:4] .self_attn.v_proj.weight[2:4]
decoder.layers.0.self_attention.linear_qkv.bias (8,): .self_attn.q_proj.bias[4:8] .self_attn.k_proj.bias[2:4] .self_attn.v_proj.bias[2:4]
decoder.layers.0.self_attention.linear_proj.weight (8, 4): .self_attn.o_proj.weight[4:8]
decoder.layers.0.pre_mlp_layernorm.weight or decoder.layers.0.mlp.linear_fc1.layer_norm_weight (8,): .post_attention_layernorm.weight[0:8]
decoder.layers.0.mlp.linear_fc1.weight (12, 8): .mlp.gate_proj.weight[6:12] .mlp.up_proj.weight[6:12]
decoder.layers.0.mlp.linear_fc2.weight (8, 6): .mlp.down_proj.weight[6:12]
decoder.final_layernorm.weight (8,): model.norm.weight[0:8]
output_layer.weight (64, 8): lm_head.weight[64:70]"""  # noqa: E501

ENGINE_RANK_1_OF_2 = """\
model.embed_tokens.weight (64, 8): model.embed_tokens.weight[64:70]
model.layers.0.input_layernorm.weight (8,): .input_layernorm.weight[0:8]
model.layers.0.self_attn.qkv_proj.weight (8, 8): .self_attn.q_proj.weight[4:8] .self_attn.k_proj.weight[2:4] .self_attn.v_proj.weight[2:4]
model.layers.0.self_attn.qkv_proj.bias (8,): .self_attn.q_proj.bias[4:8] .self_attn.k_proj.bias[2:4] .self_attn.v_proj.bias[2:4]
model.layers.0.self_attn.o_proj.weight (8, 4): .self_attn.o_proj.weight[4:8]
model.layers.0.post_attention_layernorm.weight (8,): .post_attention_layernorm.weight[0:8]
model.layers.0.mlp.gate_up_proj.weight (12, 8): .mlp.gate_proj.weight[6:12] .mlp.up_proj.weight[6:12]
model.layers.0.mlp.down_proj.weight (8, 6): .mlp.down_proj.weight[6:12]
model.norm.weight (8,): model.norm.weight[0:8]
lm_head.weight (64, 8): lm_head.weight[64:70]"""  # noqa: E501


def layout_of(family: str = "Qwen2", **changes: object) -> ModelLayout:
    """Return the layout of one layer of a family, with changed sizes."""
    return layout_for(SIZES | {"architectures": [f"{family}ForCausalLM"]} | changes)


def describe(shards: Iterable[Shard]) -> str:
    """Return one line per shard; `.name` is a tensor of layer 0."""
    lines = []
    for shard in shards:
        name = shard.name if shard.alias is None else f"{shard.name} or {shard.alias}"
        if shard.num_experts:
            name += f"[{shard.expert} of {shard.num_experts}]"
        spans = (
            f"{span.tensor.removeprefix('model.layers.0')}[{span.start}:{span.stop}]"
            for span in shard.spans
        )
        lines.append(f"{name} {shard.shape}: {' '.join(spans)}")
    return "\n".join(lines)


def names(shards: Iterable[Shard]) -> list[str]:
    return [shard.name for shard in shards]


def test_shards_of_trainer_rank():
    layout = layout_of()
    position = replica_positions(layout, tp_size=2)[1]
    shards = list(layout.megatron_shards(position))
    assert describe(shards) == TRAINER_RANK_1_OF_2
    columns = {shard.name for shard in shards if shard.axis == 1}
    assert columns == {
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }


def test_shards_of_engine_rank():
    position = EnginePosition(tp_rank=1, tp_size=2)
    assert describe(layout_of().engine_shards(position)) == ENGINE_RANK_1_OF_2


def test_experts_of_trainer_rank():
    """Experts are whole: expert parallelism replaces their tensor parallelism."""
    layout = layout_of("Qwen3Moe")
    position = replica_positions(layout, tp_size=2, ep_size=2, etp_size=1)[1]
    experts = (s for s in layout.megatron_layer(position, "0") if ".experts." in s.name)
    mlp = "decoder.layers.0.mlp.experts."
    one, two = (f"{mlp}local_experts.{{n}}.linear_fc{part}.weight" for part in (1, 2))
    assert describe(experts).splitlines() == [
        f"{one.format(n=0)} or {mlp}linear_fc1.weight0 (12, 8):"
        " .mlp.experts.2.gate_proj.weight[0:6] .mlp.experts.2.up_proj.weight[0:6]",
        f"{one.format(n=1)} or {mlp}linear_fc1.weight1 (12, 8):"
        " .mlp.experts.3.gate_proj.weight[0:6] .mlp.experts.3.up_proj.weight[0:6]",
        f"{two.format(n=0)} or {mlp}linear_fc2.weight0 (8, 6):"
        " .mlp.experts.2.down_proj.weight[0:6]",
        f"{two.format(n=1)} or {mlp}linear_fc2.weight1 (8, 6):"
        " .mlp.experts.3.down_proj.weight[0:6]",
    ]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_engine_rank_stacks_experts(expert_parallel):
    """With expert parallelism whole experts, without it half of each."""
    position = EnginePosition(tp_rank=1, tp_size=2, expert_parallel=expert_parallel)
    experts = (s for s in layout_of("Qwen3Moe").engine_layer(position, "0") if "exp" in s.name)
    mlp, stack = "model.layers.0.mlp.experts.routed_experts", ".mlp.experts"
    local, first, rows = (2, 2, slice(0, 6)) if expert_parallel else (4, 0, slice(3, 6))
    height, cut = rows.stop - rows.start, f"[{rows.start}:{rows.stop}]"
    assert describe(experts).splitlines() == [
        *(
            f"{mlp}.w13_weight[{n} of {local}] ({2 * height}, 8): {stack}.{first + n}.gate_proj"
            f".weight{cut} {stack}.{first + n}.up_proj.weight{cut}"
            for n in range(local)
        ),
        *(
            f"{mlp}.w2_weight[{n} of {local}] (8, {height}): "
            f"{stack}.{first + n}.down_proj.weight{cut}"
            for n in range(local)
        ),
    ]


def test_uneven_experts_are_rejected():
    layout = layout_of("Qwen3Moe")
    position = ShardPosition(layer_indices=(0,), ep_size=3)
    with pytest.raises(WeightError, match=r"^4 experts cannot be spread evenly over 3 ranks\.$"):
        list(layout.megatron_shards(position))


def test_tensors_are_in_model_order():
    """A checkpoint is written in this order, and rejected if a name or a shape differs."""
    layout = layout_of()
    assert tuple(layout.hf_shapes) == ALL_NAMES
    assert layout.hf_axes["model.layers.0.self_attn.k_proj.weight"] == ("kv", "hidden")
    assert layout.hf_axes["model.norm.weight"] == ("hidden",)
    assert layout.hf_shapes["model.layers.0.mlp.down_proj.weight"] == (8, 12)
    assert layout.hf_shapes["model.layers.0.self_attn.v_proj.bias"] == (4,)
    assert tuple(layout_of(tie_word_embeddings=True).hf_shapes) == ALL_NAMES[:-1]
    moe = layout_of("Qwen3Moe").hf_shapes
    experts = {name: shape for name, shape in moe.items() if "experts.3" in name}
    assert experts == {
        "model.layers.0.mlp.experts.3.gate_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.3.up_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.3.down_proj.weight": (8, 6),
    }
    assert moe["model.layers.0.mlp.gate.weight"] == (4, 8)


def test_tied_head_on_another_stage_copies_embedding():
    """With one stage the head does not exist; no stored tensor has its name."""
    layout = layout_of(num_hidden_layers=2, tie_word_embeddings=True)
    (only,) = replica_positions(layout)
    assert "output_layer.weight" not in names(layout.megatron_shards(only))
    first, last = replica_positions(layout, pp_size=2)
    assert "output_layer.weight" not in names(layout.megatron_shards(first))
    *_, head = layout.megatron_shards(last)
    assert describe([head]) == "output_layer.weight (128, 8): model.embed_tokens.weight[0:70]"


def test_first_and_last_engine_stage_have_embedding_and_head():
    """The last stage has a second copy of a tied embedding."""
    for tied, last_has in ((False, "lm_head.weight"), (True, "model.embed_tokens.weight")):
        layout = layout_of(num_hidden_layers=3, tie_word_embeddings=tied)
        stages = [
            {name for name in names(layout.engine_shards(position)) if "layers" not in name}
            for position in (EnginePosition(pp_rank=rank, pp_size=3) for rank in range(3))
        ]
        assert stages == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", last_has}]


def test_position_sets_vocabulary_padding():
    """Checkpoints of another split have other padding; the default depends on TP."""
    layout = layout_of()
    (position,) = replica_positions(layout)
    padded = replace(position, padded_vocab_size=192, tp_rank=1, tp_size=2)
    assert layout.megatron_head(padded).length == 96
    unsaid = ShardPosition(layer_indices=(0,), tp_size=3)
    assert layout.megatron_head(unsaid).length == 64


def test_runs_are_placed_end_to_end():
    spans = (Span("q", 4, 8), Span("k", 2, 4), Span("v", 2, 4))
    shard = Shard("qkv", spans, axis=0, length=9, width=3)
    assert list(shard.placed_spans()) == list(zip((0, 4, 6), spans, strict=True))
    assert shard.shape == (9, 3) and shard.numel_per_row == 3
    assert replace(shard, axis=1).shape == (3, 9)
    vector = replace(shard, width=None)
    assert vector.shape == (9,) and vector.numel_per_row == 1


def test_names_outside_layers_have_no_prefix():
    layout = layout_of("Qwen3Moe")
    assert hf_names(layout.family.head, None, None) == ["lm_head.weight"]
    *_, down = layout.family.layer
    assert hf_names(down, "7", 3) == ["model.layers.7.mlp.experts.3.down_proj.weight"]


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
    assert joined_chunks([first, second]) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_remaining_layers_go_to_first_chunks():
    assert joined_chunks(stage_chunks(6, pp_size=4)) == [(0, 1), (2, 3), (4,), (5,)]
    interleaved = joined_chunks(stage_chunks(7, pp_size=2, vpp_size=2))
    assert interleaved == [(0, 1, 4, 5), (2, 3, 6)]
    for layers in range(4, 20):
        for pp_size, vpp_size in itertools.product((1, 2, 3, 4), (1, 2)):
            if pp_size * vpp_size <= layers:
                stages = joined_chunks(stage_chunks(layers, pp_size=pp_size, vpp_size=vpp_size))
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
    stages = joined_chunks(stage_chunks(num_layers, **split))
    assert [len(stage) for stage in stages] == sizes
    assert sorted(layer for stage in stages for layer in stage) == list(range(num_layers))


@pytest.mark.parametrize("num_layers", [0, 3])
def test_chunk_without_layers_is_rejected(num_layers):
    """An empty stage would wait for activations forever."""
    message = f"^{num_layers} layers cannot be spread over 2 stages of 2 chunks"
    with pytest.raises(WeightError, match=message):
        stage_chunks(num_layers, pp_size=2, vpp_size=2)
