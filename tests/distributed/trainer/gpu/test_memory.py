"""The memory plan of trainer ranks against their allocations on the CPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import megadapo
from megadapo.config import load_config
from megadapo.data.batch import PackedBatch
from megadapo.models.description import describe_model
from megadapo.models.folder import find_hf_config
from megadapo.plan.ranks import rank_kinds, state_bytes
from megadapo.plan.training import UpdateLoad, update_bytes
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.types import Rendezvous, TrainerSettings, UpdateRequest
from megadapo.weights.layout.layout import ModelLayout, layout_for
from tests.support.trainer.batches import random_batch
from tests.support.trainer.ranks import layout, settings_for

if TYPE_CHECKING:
    import torch

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
    "bfloat16, attention": Case(layout("bf16-attn"), model={"num_hidden_layers": 4}),
    "four ways, query norms": Case({"tensor": 4}, model=QWEN3),
}
FULL_CASES = {
    "data, selective, overlap": Case({"data": 2, "recompute": ("mlp",), "overlap": True}),
    "context": Case({"context": 2}),
    "experts": Case({"data": 2, "expert": 2}, 1, EXPERTS),
    "experts, tensor": Case({"tensor": 2, "sequence": True, "recompute": ("mlp",)}, 1, EXPERTS),
    "four stages, full": Case({"pipeline": 4, "recompute": "full"}, 6, QWEN3),
    "data, stages of unequal size": Case({"pipeline": 2, "first": 3, "last": 5, "data": 2}, 3),
}


def parameters_of(
    rendezvous: Rendezvous, trainer: TrainerConfig, hf_config: dict[str, Any], ranks: Sequence[int]
) -> list[tuple[int, int]]:
    """Return counts of all and of experts' parameters by rank; runs inside a trainer process."""
    return [_parameters(trainer, hf_config, rank) for rank in ranks]


def _parameters(trainer: TrainerConfig, hf_config: dict[str, Any], rank: int) -> tuple[int, int]:
    import torch
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megadapo.models.description import describe_model
    from megadapo.trainer.model.model import build_chunks, transformer_config
    from megadapo.trainer.model.parallel import leave_groups, seed_everything

    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=trainer.num_ranks, store=FakeStore()
    )
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=trainer.tensor_parallel,
            pipeline_model_parallel_size=trainer.pipeline_parallel,
            context_parallel_size=trainer.context_parallel,
            expert_model_parallel_size=trainer.expert_parallel,
            expert_tensor_parallel_size=trainer.expert_tensor_parallel,
            create_gloo_process_groups=False,
        )
        seed_everything(0)
        model = describe_model(hf_config)
        config = transformer_config(model, trainer, dtype=torch.bfloat16)
        with torch.device("meta"):
            chunks = build_chunks(config, model, trainer)
    finally:
        leave_groups()
    sizes = [
        (name, parameter.numel())
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]
    of_experts = sum(size for name, size in sizes if ".experts." in name)
    return sum(size for _, size in sizes), of_experts


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


_STARTED = "tests::started"


@dataclass(frozen=True)
class Allocated:
    """Bytes of one rank."""

    state: int
    """Before the first update."""
    peak: int
    """Most at any moment of an update."""


def allocated(rendezvous: Rendezvous, settings: TrainerSettings, batch: PackedBatch) -> Allocated:
    """Start a rank and let it train on the batch."""
    import torch

    from megadapo.trainer.rank import TrainerRank

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        rank = TrainerRank(settings, rendezvous)
        gc.collect()
        with torch.profiler.record_function(_STARTED):
            pass
        # once: Gloo's threads free copies of the first update's gradients whenever they like
        rank.update(UpdateRequest(batch=batch, policy_version=0, step=1))
    return _largest(profile)


def _largest(profile: torch.profiler.profile) -> Allocated:
    events = profile.profiler.kineto_results.events()
    started = next(event.start_ns() for event in events if event.name() == _STARTED)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    total = state = peak = 0
    for when, num_bytes in changes:
        total += num_bytes
        if when < started:
            state = total
        else:
            peak = max(peak, total)
    return Allocated(state=state, peak=peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.full) for name, case in FULL_CASES.items()),
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
        kept = state_bytes(kind, trainer, itemsize=itemsize)
        state = kept.weights + kept.gradients + kept.optimizer
        sizes = {"itemsize": itemsize, "layers": "own on a CPU"}
        update = sum(update_bytes(model, trainer, kind, load, **sizes).values())
        for rank in found[kind.stage * per_stage : (kind.stage + 1) * per_stage]:
            assert state == pytest.approx(rank.state, rel=0.01), kind
            assert state + update == pytest.approx(rank.peak, rel=0.1), kind
