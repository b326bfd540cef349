import ast
import importlib.util
from pathlib import Path

from megadapo.cluster.environment import cpu_environment
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.platform import EnginePlatform
from megadapo.weights.sync import vllm_worker

CPU = EnginePlatform(gpus=(), shares_gpus=True)


def test_cpu_threads_are_set_but_not_pinned():
    """Pinned by vLLM, two engines on one machine would share the first core."""
    variables = CPU.environment(RolloutConfig(num_threads=3), "float32")
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_attention_on_a_cpu_does_not_split_a_sequence_over_threads():
    """Measured: with splitting, log-probs at two threads depend on the rest of the batch."""
    assert CPU.environment(RolloutConfig(), "float32")["VLLM_CPU_ATTN_SPLIT_KV"] == "0"


def test_a_cpu_engine_has_the_environment_of_all_that_computes_there() -> None:
    """Page faults would cost as much as the model does, and so would waiting threads."""
    variables = CPU.environment(RolloutConfig(num_threads=3), "float32")
    assert variables.items() >= cpu_environment(3).items()


def test_no_prompt_is_cut_on_a_cpu():
    """A seeded request whose prompt is prefilled in pieces kills vLLM's CPU engine."""
    arguments = CPU.engine_arguments(RolloutConfig(max_num_batched_tokens=64), max_model_len=500)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] == 500


def test_stages_on_a_cpu_get_the_buffers_that_vllm_does_not_allocate_there():
    """Without them the second stage stops at the first request."""
    two_stages = RolloutConfig(pipeline_parallel=2)
    name = CPU.engine_arguments(two_stages, 100)["worker_extension_cls"]
    module, _, attribute = name.rpartition(".")
    assert hasattr(getattr(importlib.import_module(module), attribute), "allocate_stage_buffers")
    gpus = EnginePlatform(gpus=("0", "1"), shares_gpus=False)
    others = [CPU.engine_arguments(RolloutConfig(), 100), gpus.engine_arguments(two_stages, 100)]
    assert {one["worker_extension_cls"] for one in others} == {vllm_worker.EXTENSION}


def test_an_engine_on_gpus_sees_its_own_only():
    platform = EnginePlatform(gpus=("2", "3"), shares_gpus=False)
    variables = platform.environment(
        RolloutConfig(tensor_parallel=2, batch_invariant=True), "bfloat16"
    )
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["VLLM_BATCH_INVARIANT"] == "1"
    assert "OMP_NUM_THREADS" not in variables


def test_only_an_engine_that_shares_its_gpu_sleeps():
    assert EnginePlatform(gpus=("0",), shares_gpus=True).sleeps
    assert not EnginePlatform(gpus=("0",), shares_gpus=False).sleeps
    assert not CPU.sleeps
    shared = EnginePlatform(gpus=("0",), shares_gpus=True)
    assert shared.engine_arguments(RolloutConfig(), 100)["enable_sleep_mode"] is True


def test_vllm_knows_every_argument_of_an_engine_on_gpus() -> None:
    """Some of them no engine on a CPU is started with. Read, as importing vLLM takes seconds."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text())
    (arguments,) = [one for one in source.body if getattr(one, "name", "") == "EngineArgs"]
    known = {one.target.id for one in arguments.body if isinstance(one, ast.AnnAssign)}
    shared = EnginePlatform(gpus=("0",), shares_gpus=True)
    assert shared.engine_arguments(RolloutConfig(), 100).keys() <= known
