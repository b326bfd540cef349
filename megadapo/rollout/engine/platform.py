"""What differs for an engine between CPU and CUDA: environment, engine arguments, sleeping.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megadapo.cluster.environment import cpu_environment, full_precision
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine import cpu_stages
from megadapo.weights.sync import vllm_worker

GIB = 1 << 30
EXPERTS_EXTENSION = "megadapo.rollout.engine.cpu_experts.HandsOverExperts"
"""Its module imports vLLM, and is named alone here."""

SCHEDULER = "megadapo.rollout.engine.scheduler.PiecewiseScheduler"
"""Its module imports vLLM, and is named alone here."""

VLLM_QUANTIZATION = {"none": None, "fp8": "fp8_per_block"}
"""vLLM's names. With one scale for a whole matrix its ranks would have to agree on it, each time a
layer is complete, and an update completes layers in another order on every rank."""


@dataclass(frozen=True, kw_only=True)
class EnginePlatform:
    """Where one engine runs."""

    gpus: tuple[str, ...]
    """What the engine's node calls its GPUs, one per rank; empty on a CPU."""
    shares_gpus: bool
    """Whether a trainer works on the same GPUs, so that the engine must sleep meanwhile."""

    @property
    def uses_cuda(self) -> bool:
        return bool(self.gpus)

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives its memory back between rollouts."""
        return self.uses_cuda and self.shares_gpus

    def adds_stage_buffers(self, config: RolloutConfig) -> bool:
        """Whether later stages get their buffers from us, since vLLM allocates none on the CPU."""
        return not self.uses_cuda and config.pipeline_parallel > 1

    def environment(self, config: RolloutConfig, dtype: str) -> dict[str, str]:
        """Environment variables of the engine's processes."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # a forked child would not carry the guard's mark
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if self.uses_cuda:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            variables["VLLM_BATCH_INVARIANT"] = str(int(config.batch_invariant))
            return variables | full_precision(dtype)
        # vLLM would pin every engine's threads to the same first cores, and asks for a NUMA node
        # per rank; unpinned threads let engines, ranks and trainer share the cores
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # splitting a sequence over threads depends on what else is in the batch
        variables["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        return variables | cpu_environment(config.num_threads)

    def engine_arguments(
        self, config: RolloutConfig, max_model_len: int, *, returns_experts: bool = False
    ) -> dict[str, Any]:
        """Arguments of vLLM's AsyncEngineArgs that depend on the device.

        `returns_experts`: Of each token; on the CPU rollout/engine/cpu_experts.py does the rest.
        """
        if self.uses_cuda:
            return {
                "worker_extension_cls": vllm_worker.EXTENSION,
                "enforce_eager": config.enforce_eager,
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "enable_sleep_mode": self.sleeps,
                "enable_return_routed_experts": returns_experts,
                "quantization": VLLM_QUANTIZATION[config.quantization],
                "sleep_mode_offload_cudagraph": config.sleep_mode_offload_cudagraph,
                "enable_nccl_comm_suspend": config.enable_nccl_comm_suspend,
            }
        return {
            "worker_extension_cls": self._cpu_extension(config, returns_experts),
            "scheduler_cls": SCHEDULER,
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
            # vLLM rewinds a seeded request's generator after a partial prefill, which a CPU
            # generator cannot do: the engine would die at the first prompt that is cut
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, max_model_len),
        }

    def _cpu_extension(self, config: RolloutConfig, returns_experts: bool) -> str:
        if returns_experts:  # never with stages: config/conflicts.py
            return EXPERTS_EXTENSION
        adds_buffers = self.adds_stage_buffers(config)
        return cpu_stages.EXTENSION if adds_buffers else vllm_worker.EXTENSION
