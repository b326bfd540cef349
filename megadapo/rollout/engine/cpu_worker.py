"""The extension of vLLM's CPU worker: pipeline buffers, and the experts of each token.

vLLM allocates the buffers of later stages while it measures memory or compiles; an eager CPU engine
does neither and would stop at its first request. vLLM's scheduler and routers can return experts,
but only the second model runner connects them, and the CPU has the first. This file connects them
in the same way, so that CPU and GPU engines return the same experts.

Written for vLLM 0.32. `expert_config` runs in the engine's actor, the rest in vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    get_aux_output_connector,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from megadapo.kernels.torch_internals import settle_vector_functions
from megadapo.weights.sync.vllm_plugin import UpdateExtension

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsPP
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.input_batch import InputBatch

# vLLM's workers import this module before they build the model
settle_vector_functions()


class _CpuConfig(VllmConfig):
    """A configuration that does not refuse to return experts on a CPU."""

    def _verify_aux_output_compatibility(self) -> None:
        """Skip the check; config/conflicts.py has the parts of it that apply."""


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


@dataclass(frozen=True)
class _Scheduled:
    """The fields of a step's requests that the connector reads; their tokens follow each other."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray  # [requests + 1]
    num_computed_tokens_np: np.ndarray  # [requests], tokens before the step's


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
        # before sampling, which counts the step's tokens as computed
        pending = self._connector.prepare_output(cast("InputBatch", self._scheduled()))
        output = cast(ModelRunnerOutput, self._sample(grammar))
        if pending is not None:
            num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def _scheduled(self) -> _Scheduled:
        batch = self._runner.input_batch
        ids = list(batch.req_ids)
        return _Scheduled(
            req_ids=ids,
            query_start_loc_np=np.cumsum([0, *(self._num_tokens[one] for one in ids)]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(ids)].copy(),
        )
