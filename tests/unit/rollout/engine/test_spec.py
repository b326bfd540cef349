"""Settings of one engine, its load and its error messages, all without vLLM."""

import importlib
import time
from contextlib import nullcontext

import pytest

from megadapo.cluster.process_log import START_LINE
from megadapo.cluster.processes import cpu_environment
from megadapo.errors import ConfigError
from megadapo.models.shape import model_shape
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import describe_failure, root_cause
from megadapo.rollout.engine.spec import validate_engine_layout
from megadapo.rollout.types import ActivityCounter
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
WORKER = "(Worker pid=7) ERROR 11-20 07:09:16 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=6) ERROR 11-20 07:09:16 [core.py:1512] "


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


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def step(counter, running, **numbers):
    counter.step(
        running=running,
        waiting=numbers.get("waiting", 0),
        kv_use=numbers.get("kv_use", 0.0),
        num_preemptions=numbers.get("preemptions", 0),
        num_prompt_tokens=numbers.get("prompt", 0),
        num_cached_tokens=numbers.get("cached", 0),
    )


def test_means_are_weighted_by_time(clock):
    """A mean over steps would weight short and long ones alike, and count idle time."""
    counter = ActivityCounter(8)
    clock[0] += 10.0  # nothing runs yet
    step(counter, 8, waiting=5, kv_use=0.5, prompt=40, cached=32)
    clock[0] += 1.0
    step(counter, 4, waiting=2, kv_use=0.75, preemptions=2, prompt=20)
    clock[0] += 3.0
    step(counter, 0)
    clock[0] += 6.0
    taken = counter.take(20)
    assert taken.num_tokens == 20 and taken.num_preemptions == 2 and taken.max_waiting == 5
    assert taken.seconds == pytest.approx(20.0) and taken.busy_seconds == pytest.approx(4.0)
    assert taken.mean_running == pytest.approx((8 * 1.0 + 4 * 3.0) / 4.0 / 8)
    assert taken.max_kv_use == 0.75
    assert (taken.num_prompt_tokens, taken.num_cached_tokens) == (60, 32)


def test_take_resets_counts_but_keeps_running_responses(clock):
    counter = ActivityCounter(4)
    step(counter, 2, waiting=9, kv_use=0.9, preemptions=1, prompt=9, cached=8)
    clock[0] += 2.0
    counter.take(3)
    clock[0] += 1.0
    step(counter, 0)
    taken = counter.take(5)
    assert taken.num_tokens == 2
    assert taken.busy_seconds == pytest.approx(1.0) and taken.mean_running == pytest.approx(0.5)
    assert (taken.max_waiting, taken.num_preemptions, taken.max_kv_use) == (0, 0, 0.0)
    assert (taken.num_prompt_tokens, taken.num_cached_tokens) == (0, 0)


def test_idle_engine_is_not_busy(clock):
    taken = ActivityCounter(4).take(0)
    assert (taken.busy_seconds, taken.mean_running, taken.seconds) == (0.0, 0.0, 0.0)


def explained(folder, text, detail=""):
    """Return the message about an engine with this log, whose path it names."""
    path = folder / "engine-0.log"
    path.write_text(START_LINE + text)
    message = describe_failure("rollout engine 0 could not start", detail, path)
    assert str(path) in message
    return message


def test_first_cause_is_found_among_its_consequences():
    log = (
        f"{WORKER}Traceback (most recent call last):\n"
        f"{WORKER}RuntimeError: CPU Generator does not use offset\n"
        f"{CORE}RuntimeError: Worker failed with error 'CPU Generator does not use offset'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "RuntimeError: CPU Generator does not use offset"


def test_errors_of_earlier_starts_are_ignored():
    old = f"{START_LINE}ValueError: an old error\n"
    assert root_cause(old) == "ValueError: an old error"
    assert root_cause(old + START_LINE + "started\n") is None


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            "ValueError: To serve at least one request with the models's max seq len (4096), "
            "(2.0 GiB KV cache is needed, which is larger than the available KV cache memory",
            "raise rollout.kv_cache_gib",
        ),
        (
            "ValueError: Available memory on node 0 (3/24 GiB) on kv cache allocation is less "
            "than requested memory for kv (64.0 GiB).",
            "lower rollout.kv_cache_gib",
        ),
        (
            "ValueError: Free memory on device (10/80 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 72 GiB).",
            "lower rollout.gpu_memory_utilization",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower rollout.gpu_memory_utilization"),
        (
            "OSError: models/none is not a local folder and is not a valid model identifier",
            "model.path",
        ),
    ],
)
def test_known_cause_comes_with_a_remedy(tmp_path, cause, remedy):
    end = "RuntimeError: Engine core initialization failed. See root cause above.\n"
    text = explained(tmp_path, f"{CORE}{cause}\n{end}")
    assert cause in text and remedy in text


def test_validation_error_fits_on_one_line(tmp_path):
    detail = (
        "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified "
        "max_model_len (4192) is greater than the derived max_model_len [type=value_error, "
        "input_value=ArgsKwargs()]\n    For further information visit https://errors.pydantic.dev"
    )
    text = describe_failure("engine 0 could not start", detail, tmp_path / "none.log")
    assert text.startswith("engine 0 could not start: Value error, User-specified max_model_len")
    assert "rollout.max_response_tokens" in text
    assert "\n" not in text and "pydantic" not in text


def test_log_is_read_only_if_the_error_has_its_cause_elsewhere(tmp_path):
    log = f"{WORKER}ValueError: a plugin is missing\n"
    assert "plugin" not in explained(tmp_path, log, "OSError: the prompt is too long")
    dead = "EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
    assert "plugin" in explained(tmp_path, log, dead)


def test_without_log_the_exception_is_shown(tmp_path):
    text = describe_failure("engine 1 died", "OSError: disk failure", tmp_path / "none.log")
    assert "engine 1 died: OSError: disk failure" in text
