"""The start of vLLM, and its statistics of every step.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

from pathlib import Path

from vllm.config import ProfilerConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from megadapo.rollout.engine.activity import ActivityCounter
from megadapo.rollout.engine.cpu_worker import expert_config
from megadapo.rollout.engine.scheduler import scheduler_class
from megadapo.rollout.engine.spec import EngineSpec

WEIGHT_TRANSFER_BACKEND = "megadapo"
"""Name under which weights/sync/vllm_plugin.py registers our weight-transfer engine."""


def start_vllm(spec: EngineSpec, counter: ActivityCounter) -> AsyncLLM:
    """Start vLLM's processes with the model; `counter` counts their steps."""
    # our weight-transfer engine must be registered before the configuration is checked
    load_general_plugins()
    from_trainer = spec.weights_from == "trainer"
    arguments = AsyncEngineArgs(
        model=spec.model,
        dtype=spec.dtype,
        load_format="dummy" if from_trainer else "auto",
        tensor_parallel_size=spec.config.tensor_parallel,
        pipeline_parallel_size=spec.config.pipeline_parallel,
        enable_expert_parallel=spec.config.expert_parallel,
        # inside a Ray actor vLLM would choose Ray for several ranks; on the CPU it would replace
        # the name "uni" by "mp", whose processes wait for each other in busy loops
        distributed_executor_backend=(
            "mp" if spec.config.ranks_per_engine > 1 else UniProcExecutor
        ),
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.config.max_num_seqs,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=(
            WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND) if from_trainer else None
        ),
        disable_log_stats=True,
        scheduling_policy="priority",
        profiler_config=_profiler(spec.profile_folder),
        seed=0,
        **spec.engine_arguments(),
    )
    usage = UsageContext.ENGINE_CONTEXT
    cpu_experts = spec.returns_experts and not spec.uses_cuda
    config = expert_config(arguments) if cpu_experts else arguments.create_engine_config(usage)
    # vLLM decides only here whether scheduling is asynchronous
    config.scheduler_config.scheduler_cls = scheduler_class(config.scheduler_config)
    llm = AsyncLLM.from_vllm_config(
        config,
        usage_context=usage,
        stat_loggers=[lambda config, index: _StepLogger(counter)],
        disable_log_stats=True,
    )
    # statistics of every token would cost the actor 2 microseconds each; this task has not run yet,
    # and the first request starts it again with the new setting
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        llm.output_handler = None
    llm.log_stats = llm.output_processor.log_stats = False
    return llm


def _profiler(folder: Path) -> ProfilerConfig:
    """Return the settings of vLLM's profiler, which is idle until it is started."""
    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(folder),
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,
        torch_profiler_dump_cuda_time_total=False,
        # the actor only forwards requests
        ignore_frontend=True,
    )


class _StepLogger(StatLoggerBase):
    """A vLLM logger that passes the numbers of every step to a counter."""

    def __init__(self, counter: ActivityCounter) -> None:
        self._counter = counter

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        cache = scheduler_stats.prefix_cache_stats
        self._counter.step(
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_use=scheduler_stats.kv_cache_usage,
            num_preemptions=cache.preempted_requests,
            num_prompt_tokens=cache.queries,
            num_cached_tokens=cache.hits,
        )

    def log_engine_initialized(self) -> None:
        """Do nothing: the configuration is in the engine's log."""
