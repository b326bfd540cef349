"""Everything that one rollout engine is started from, on a CPU or on GPUs.

Imports neither torch nor vLLM, so that a dry run can check the layout at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megadapo.cluster.config import START_TIMEOUT_S
from megadapo.cluster.process_log import engine_log
from megadapo.cluster.processes import cpu_environment, full_precision
from megadapo.errors import ConfigError
from megadapo.models.shape import ModelShape
from megadapo.rollout.config import RolloutConfig

GIB = 1 << 30

# these modules import vLLM, so they are only named here
EXTENSION = "megadapo.weights.sync.vllm_plugin.UpdateExtension"
CPU_EXTENSION = "megadapo.rollout.engine.start_vllm.CpuWorker"

VLLM_QUANTIZATION = {"none": None, "fp8": "fp8_per_block"}
"""vLLM's names. One scale for a whole matrix would not work: the engine's ranks would have to agree
on it whenever a layer is complete, and an update completes layers in a different order per rank."""

CPU_DEFAULTS: dict[str, Any] = {"block_size": 32}
"""Arguments of vLLM's engine on a CPU where rollout.vllm has none. A group shares whole blocks of
its prompt only, and vLLM's 128 tokens are longer than many prompts."""

WeightDtype = Literal["float32", "bfloat16"]
"""Type of an engine's weights and activations."""

WeightsFrom = Literal["folder", "trainer"]
"""Whether an engine loads the model's weights or waits for a trainer to publish its own."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything one engine is started from."""

    index: int
    model: str
    """Hugging Face folder or Hub name."""
    dtype: WeightDtype
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    weights_from: WeightsFrom
    config: RolloutConfig
    gpus: tuple[str, ...]
    """The node's numbers of the engine's GPUs, one per rank; empty on a CPU."""
    shares_gpus: bool
    """Whether a trainer works on the same GPUs, so that the engine sleeps meanwhile."""
    log_file: Path
    returns_experts: bool = False
    """Whether responses come with the experts of each token."""
    start_timeout_s: float = START_TIMEOUT_S

    def at(self, index: int, gpus: tuple[str, ...]) -> EngineSpec:
        """Return the spec of another engine with the same settings."""
        log_file = engine_log(self.log_file.parent, index)
        return replace(self, index=index, gpus=gpus, log_file=log_file)

    @property
    def uses_cuda(self) -> bool:
        return bool(self.gpus)

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees its GPU memory between rollouts."""
        return self.uses_cuda and self.shares_gpus

    @property
    def profile_folder(self) -> Path:
        """Folder in which the engine's ranks write their profiles."""
        return self.log_file.parent / f"engine-{self.index}-profile"

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the engine's processes."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # a forked child would not carry the guard's mark
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if self.uses_cuda:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            variables["VLLM_BATCH_INVARIANT"] = str(int(self.config.batch_invariant))
            return variables | full_precision(self.dtype)
        # vLLM would pin the threads of every engine to the same first cores and ask for a NUMA node
        # per rank; unpinned threads let engines, ranks and trainer share the cores
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # splitting a sequence over threads depends on the rest of the batch
        variables["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        return variables | cpu_environment(self.config.num_threads)

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's AsyncEngineArgs that depend on the device or are given in
        rollout.vllm."""
        config = self.config
        given = config.vllm_arguments
        if self.uses_cuda:
            return given | {
                "worker_extension_cls": EXTENSION,
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enable_sleep_mode": self.sleeps,
                "enable_return_routed_experts": self.returns_experts,
                "quantization": VLLM_QUANTIZATION[config.quantization],
            }
        given = CPU_DEFAULTS | given
        return given | {
            "worker_extension_cls": CPU_EXTENSION,
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
            # vLLM rewinds a seeded request's generator after a partial prefill, which a CPU
            # generator cannot do: the engine would die at the first prompt that is split
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(given["max_num_batched_tokens"], self.max_model_len),
        }


def validate_engine_layout(shape: ModelShape, rollout: RolloutConfig) -> None:
    """Check that the model's sizes allow the engines' layout.

    vLLM repeats key-value heads if there are fewer than ranks, and pads the vocabulary.

    Raises:
        ConfigError: names each key that does not fit, and the size of the model that it must fit.
    """
    ranks, stages, heads = rollout.tensor_parallel, rollout.pipeline_parallel, shape.num_kv_heads
    divided = {"num_attention_heads": shape.num_heads}
    if not shape.num_experts:
        divided["intermediate_size"] = shape.ffn_size
    elif rollout.expert_parallel:
        divided["num_experts"] = shape.num_experts
    else:
        divided["moe_intermediate_size"] = shape.expert_ffn_size
    problems = [
        _misfit("tensor_parallel", ranks, "divide", name, size)
        for name, size in divided.items()
        if size % ranks
    ]
    if heads % ranks and ranks % heads:
        found = _misfit("tensor_parallel", ranks, "divide or repeat", "num_key_value_heads", heads)
        problems.append(found)
    if (layers := shape.num_layers) < stages:
        found = _misfit("pipeline_parallel", stages, "fit into", "num_hidden_layers", layers)
        problems.append(found)
    if rollout.expert_parallel and not shape.num_experts:
        problems.append(
            "rollout.expert_parallel = true needs a model with experts, and this one has none"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _misfit(key: str, value: int, what: str, name: str, size: int) -> str:
    return f"rollout.{key} = {value} does not {what} the model's {name} = {size}"
