"""The memory plan of trainer ranks against their allocations on the CPU."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import megadapo
from megadapo.config import load_config
from megadapo.models.description import describe_model
from megadapo.models.folder import find_hf_config
from megadapo.plan.ranks import rank_kinds, state_bytes
from megadapo.plan.training import UpdateLoad, update_bytes
from megadapo.weights.layout.layout import ModelLayout, layout_for
from tests.support.models.meta import parameters_of
from tests.support.processes.peak_allocations import allocated
from tests.support.trainer.batches import random_batch
from tests.support.trainer.ranks import settings_for

NUM_TOKENS = 768
"""Tokens of a micro-batch; most of the memory is then activations."""
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 48, "tie_word_embeddings": True}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
"""Small ones: Gloo copies a buffer of gradients to add it up, which must be less than what the
activations took before."""


@dataclass(frozen=True)
class Case:
    """A layout, and the micro-batches of its one mini-batch."""

    layout: dict[str, Any]
    num_micro_batches: int = 1
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "tensor, sequence, stages": Case({"tensor": 2, "pipeline": 2, "sequence": True}, 2),
    "virtual stages, full": Case({"pipeline": 2, "virtual": 2, "recompute": "full"}, 2),
    "bfloat16, attention": Case({"dtype": "bfloat16", "recompute": ("core_attn",)}),
    "four ways, query norms": Case({"tensor": 4}, model=QWEN3),
}
SLOW_CASES = {
    "data, selective, overlap": Case({"data": 2, "recompute": ("mlp",), "overlap": True}),
    "context": Case({"context": 2}),
    "experts": Case({"data": 2, "expert": 2}, 1, EXPERTS),
    "experts, tensor": Case({"tensor": 2, "sequence": True, "recompute": ("mlp",)}, 1, EXPERTS),
    "four stages, full": Case({"pipeline": 4, "recompute": "full"}, 6, QWEN3),
    "data, stages of unequal size": Case({"pipeline": 2, "first": 3, "last": 5, "data": 2}, 3),
}


CONFIGS = Path(megadapo.__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path.stem, marks=[] if path.stem == "qwen2.5-7b" else pytest.mark.full)
        for path in sorted(CONFIGS.glob("qwen*.toml"))
    ],
)
def test_shipped_recipes_have_megatrons_parameters(ranks, recipe):
    """The last rank of each stage, built by megatron-core for as many ranks as the recipe has."""
    config = load_config(CONFIGS / f"{recipe}.toml")
    trainer, hf_config = config.trainer, find_hf_config(config.model.path)
    per_stage = trainer.num_ranks // trainer.pipeline_parallel
    lasts = [stage * per_stage + per_stage - 1 for stage in range(trainer.pipeline_parallel)]
    (found,) = ranks.run(1, parameters_of, trainer, hf_config, lasts)
    planned = rank_kinds(layout_for(hf_config), trainer)
    assert found == [(kind.num_parameters, kind.num_expert_parameters) for kind in planned]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.full) for name, case in SLOW_CASES.items()),
    ],
)
def test_a_rank_allocates_what_was_planned(ranks, tmp_path, case):
    hf_config = MODEL | case.model
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    sizes = {"init": "random", "tokens_per_micro_batch": NUM_TOKENS}
    settings = settings_for(tmp_path, **sizes, **case.layout)
    trainer, itemsize = settings.trainer, 2 if settings.model.dtype == "bfloat16" else 4
    num_sequences = case.num_micro_batches * trainer.data_parallel
    batch = random_batch([NUM_TOKENS] * num_sequences)
    found = ranks.run(trainer.num_ranks, allocated, settings, batch)

    model = describe_model(hf_config)
    load = UpdateLoad(
        tokens_per_micro_batch=NUM_TOKENS,
        num_micro_batches=case.num_micro_batches,
        num_step_tokens=case.num_micro_batches * NUM_TOKENS,
    )
    per_stage = trainer.num_ranks // trainer.pipeline_parallel
    for kind in rank_kinds(ModelLayout(model.family, model.shape), trainer):
        state = state_bytes(kind, trainer, itemsize=itemsize).total
        sizes = {"itemsize": itemsize, "layers": "own on a CPU"}
        update = update_bytes(model, trainer, kind, load, **sizes).total
        for rank in found[kind.stage * per_stage : (kind.stage + 1) * per_stage]:
            assert state == pytest.approx(rank.state, rel=0.01), kind
            assert state + update == pytest.approx(rank.peak, rel=0.1), kind
