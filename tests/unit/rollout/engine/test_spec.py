"""The environment and arguments of engines on CPU and GPUs, and the layouts a model allows."""

import importlib
from contextlib import nullcontext

import pytest

from megadapo.cluster.processes import cpu_environment
from megadapo.errors import ConfigError
from megadapo.models.shape import model_shape
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.spec import validate_engine_layout
from tests.support.rollout.engine_specs import engine_spec

DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 96,
    "vocab_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "moe_intermediate_size": 10,
}


def test_cpu_environment():
    """Threads are set; pinned by vLLM, two engines on one machine would share the first core."""
    variables = engine_spec(config=RolloutConfig(num_threads=3)).environment()
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    # measured: with splitting, log-probs at two threads depend on the rest of the batch
    assert variables["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    # page faults and waiting threads would cost as much as the model
    assert variables.items() >= cpu_environment(3).items()


def test_gpu_environment_shows_own_gpus_only():
    config = RolloutConfig(tensor_parallel=2, batch_invariant=True)
    variables = engine_spec(gpus=("2", "3"), config=config, dtype="bfloat16").environment()
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["VLLM_BATCH_INVARIANT"] == "1"
    assert "OMP_NUM_THREADS" not in variables


def test_cpu_engine_does_not_split_prompts():
    """A seeded request whose prompt is prefilled in parts kills vLLM's CPU engine."""
    config = RolloutConfig(vllm={"max_num_batched_tokens": 64, "enable_chunked_prefill": True})
    arguments = engine_spec(config=config, max_model_len=500).engine_arguments()
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] == 500


@pytest.mark.parametrize("method", ["allocate_stage_buffers", "return_experts", "weight_version"])
def test_cpu_worker_extension_has_the_methods_the_engine_calls(method: str):
    """Without stage buffers the second stage stops at the first request."""
    name = engine_spec().engine_arguments()["worker_extension_cls"]
    module, _, attribute = name.rpartition(".")
    assert hasattr(getattr(importlib.import_module(module), attribute), method)


def test_only_engines_on_shared_gpus_sleep():
    shared = engine_spec(gpus=("0",), shares_gpus=True)
    assert shared.sleeps and shared.engine_arguments()["enable_sleep_mode"] is True
    assert not engine_spec(gpus=("0",), shares_gpus=False).sleeps
    assert not engine_spec(shares_gpus=True).sleeps


@pytest.mark.parametrize(
    ("model", "layout", "problem"),
    [
        # heads are repeated if there are fewer of them than ranks; whole experts are not split
        (DENSE, {"tensor_parallel": 4}, None),
        (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 3}, None),
        (EXPERTS, {"tensor_parallel": 2}, None),
        (EXPERTS, {"tensor_parallel": 6, "expert_parallel": True}, None),
        (DENSE, {"tensor_parallel": 8}, "tensor_parallel = 8 .*num_attention_heads = 12"),
        (DENSE, {"tensor_parallel": 3}, "tensor_parallel = 3 .*num_key_value_heads = 2"),
        (DENSE, {"pipeline_parallel": 4}, "pipeline_parallel = 4 .*num_hidden_layers = 3"),
        (DENSE, {"tensor_parallel": 2, "expert_parallel": True}, "this one has none"),
        (EXPERTS, {"tensor_parallel": 4}, "tensor_parallel = 4 .*moe_intermediate_size = 10"),
        (EXPERTS, {"tensor_parallel": 4, "expert_parallel": True}, "= 4 .*num_experts = 6"),
    ],
)
def test_only_invalid_layouts_are_refused(model, layout, problem):
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        validate_engine_layout(model_shape(model), RolloutConfig(**layout))


def test_all_layout_problems_are_reported_together():
    layout = RolloutConfig(tensor_parallel=8, pipeline_parallel=4)
    with pytest.raises(ConfigError) as caught:
        validate_engine_layout(model_shape(DENSE), layout)
    assert len(str(caught.value).splitlines()) == 2
