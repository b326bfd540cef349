"""The start of vLLM, and what this project adds to its processes. Written for vLLM 0.32.

- Logger, in the engine's actor: it counts every step.
- CPU worker, in vLLM's workers: pipeline buffers, and the experts of each token. vLLM allocates the
  buffers of later stages while it measures memory or compiles; an eager CPU engine does neither and
  would stop at its first request. vLLM's scheduler and routers can return experts, but only the
  second model runner connects them, and the CPU has the first. This file connects them in the same
  way, so that CPU and GPU engines return the same experts.
- Schedulers, in vLLM's core: they send tokens in batches to the actor. vLLM sends the output of
  every step for every request, each log-prob as an array of its own. With many responses that is
  milliseconds of both processes in every step, although responses are read only when they are
  complete.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from vllm.config import ProfilerConfig, SchedulerConfig, VllmConfig, WeightTransferConfig
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    get_aux_output_connector,
)
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from megadapo.kernels.torch_internals import settle_vector_functions
from megadapo.rollout.engine.spec import EngineSpec
from megadapo.rollout.types import ActivityCounter
from megadapo.weights.sync.vllm_plugin import UpdateExtension

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models.interfaces import SupportsPP
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.input_batch import InputBatch

# vLLM's workers import this module before they build the model
settle_vector_functions()

WEIGHT_TRANSFER_BACKEND = "megadapo"
"""Name under which weights/sync/vllm_plugin.py registers our weight-transfer engine."""
HELD_S = 0.5
"""Longest time for which tokens are held back, about. It is below the lower bound of
rollout.engine_progress_timeout_s, so that a working engine shows progress."""

_JOINED = ("request_id", "new_token_ids", "new_logprobs", "routed_experts")
_REST = {
    field.name: field.default
    for field in msgspec.structs.fields(EngineCoreOutput)
    if field.name not in _JOINED
}
_get_rest = attrgetter(*_REST)
_NO_REST = tuple(_REST.values())


def start_vllm(spec: EngineSpec, counter: ActivityCounter) -> AsyncLLM:
    """Start vLLM's processes with the model; `counter` counts their steps."""
    # vLLM's core and workers import this module without these
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.async_llm import AsyncLLM

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


class _CpuConfig(VllmConfig):
    """A configuration that does not refuse to return experts on a CPU."""

    def _verify_aux_output_compatibility(self) -> None:
        """Skip the check; config/run_config.py has the parts of it that apply."""


def expert_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's configuration of a CPU engine that returns experts."""
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.aux_output_config.enable_return_routed_experts = True
    # vLLM checks it a second time in the process that receives it
    config.__class__ = _CpuConfig
    return config


class CpuWorker(UpdateExtension):
    """The methods mixed into vLLM's CPU worker; the actor calls them on every rank by name."""

    model_runner: CPUModelRunner
    vllm_config: VllmConfig

    def allocate_stage_buffers(self) -> None:
        """Allocate the input buffers of a later pipeline stage."""
        import torch
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            model = cast("SupportsPP", runner.model)
            dtype = runner.model_config.dtype
            assert isinstance(dtype, torch.dtype), "vLLM has resolved it by now"
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=dtype,
                device=runner.device,
            )

    def return_experts(self) -> None:
        """Record the routers' choices from the next step on."""
        runner = self.model_runner
        connector = get_aux_output_connector(
            model=runner.get_model(),
            vllm_config=self.vllm_config,
            kv_cache_config=runner.kv_cache_config,
        )
        _ConnectedRunner(runner, connector)


class _ConnectedRunner:
    """A layer between vLLM's worker and its runner, which runs one step at a time."""

    def __init__(self, runner: CPUModelRunner, connector: AuxOutputWorkerConnector) -> None:
        self._runner, self._connector = runner, connector
        self._execute: Callable[..., Any] = runner.execute_model
        self._sample: Callable[..., Any] = runner.sample_tokens
        self._num_tokens: dict[str, int] = {}
        vars(runner).update(execute_model=self.execute_model, sample_tokens=self.sample_tokens)

    def execute_model(self, scheduled: SchedulerOutput, *args: object) -> object:
        """Run the model while the connector records its routers."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        self._num_tokens = scheduled.num_scheduled_tokens
        return self._execute(scheduled, *args)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample, and add the experts of the step's tokens to the output."""
        batch = self._runner.input_batch
        ids = list(batch.req_ids)
        # the fields that the connector reads; the tokens of the requests follow each other
        scheduled = SimpleNamespace(
            req_ids=ids,
            query_start_loc_np=np.cumsum([0, *(self._num_tokens[one] for one in ids)]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(ids)].copy(),
        )
        # before sampling, which counts the step's tokens as computed
        pending = self._connector.prepare_output(cast("InputBatch", scheduled))
        output = cast(ModelRunnerOutput, self._sample(grammar))
        if pending is not None:
            num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class HeldTokens:
    """The tokens of each request that are held back."""

    def __init__(self) -> None:
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._sent_in: dict[str, int] = {}
        """Period of the latest message of each request."""

    def take(
        self, output: EngineCoreOutput, *, period: int, at_once: bool = False
    ) -> EngineCoreOutput | None:
        """Add an output; return all held ones joined if they are due, else None.

        A request has one message per period, so steps that are longer than a period are not held
        back. Periods are the same for all requests, so that most requests share their messages. An
        output with more than tokens, such as the end of a response, is due at once.
        """
        name = output.request_id
        if (
            self._sent_in.get(name) == period
            and not at_once
            # a tensor is never equal to a default
            and _get_rest(output) == _NO_REST
        ):
            self._held.setdefault(name, []).append(output)
            return None
        held = self._held.pop(name, [])
        if output.finished:
            self._sent_in.pop(name, None)
        else:
            self._sent_in[name] = period
        return _joined([*held, output]) if held else output


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last output with the tokens of all."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    experts = [output.routed_experts for output in outputs if output.routed_experts is not None]
    if experts:
        last.routed_experts = np.concatenate(experts)
    tables = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if tables:
        # a step has as many columns as the request with the most log-probs; each needs its first
        width = min(table.logprobs.shape[1] for table in tables)
        last.new_logprobs = LogprobsLists(
            np.concatenate([table.logprob_token_ids[:, :width] for table in tables]),
            np.concatenate([table.logprobs[:, :width] for table in tables]),
            np.concatenate([table.sampled_token_ranks for table in tables]),
        )
    return last


class BatchingScheduler(Scheduler):
    """A scheduler that holds tokens back for HELD_S seconds.

    It also sends an output for each aborted request, with the tokens that were held back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens = HeldTokens()
        self._aborted: list[Request] = []

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        for request in self._aborted:
            end = EngineCoreOutput(
                request.request_id, [], finish_reason=request.get_finished_reason()
            )
            by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(end)
        self._aborted.clear()
        period = int(time.monotonic() / HELD_S)
        for outputs in by_client.values():
            taken = [
                self._tokens.take(
                    output, period=period, at_once=self._has_stop_texts(output.request_id)
                )
                for output in outputs.outputs
            ]
            outputs.outputs = [output for output in taken if output is not None]
        return by_client

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            # a finished request causes one more step, even if no other request is left
            self._aborted += finished
        return finished

    def _has_stop_texts(self, request_id: str) -> bool:
        """Return whether the request has stop texts, which vLLM looks for in the actor."""
        params = request.sampling_params if (request := self.requests.get(request_id)) else None
        return bool(params and params.stop)


class AsyncBatchingScheduler(BatchingScheduler, AsyncScheduler):
    """The same for asynchronous scheduling, which plans a step while the last one runs."""


def scheduler_class(config: SchedulerConfig) -> type[BatchingScheduler]:
    """Return the scheduler that fits vLLM's completed configuration."""
    return AsyncBatchingScheduler if config.async_scheduling else BatchingScheduler
