"""What vLLM's CPU worker lacks to hand over the experts of each token, added by vLLM's own means.

vLLM has all of it but one link: its scheduler sends the parts of a response out with their experts,
and its routers can be listened to, but only its second model runner connects the two, and the CPU
has the first. Here that runner's steps are connected, so that engines on the CPU and on GPUs give
the same thing. Tried on vLLM 0.32; it runs in vLLM's workers.
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

from megadapo.weights.sync.vllm_worker import HeldVersion

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.input_batch import InputBatch


class _ConfigOfCpu(VllmConfig):
    """A configuration that does not refuse what is connected here."""

    def _verify_aux_output_compatibility(self) -> None:
        """What is left of the check is the configuration's: config/conflicts.py."""


def engine_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """vLLM's configuration of a CPU engine that hands over experts."""
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.aux_output_config.enable_return_routed_experts = True
    # it is checked a second time in the process that it is sent to
    config.__class__ = _ConfigOfCpu
    return config


class HandsOverExperts(HeldVersion):
    """Mixed into vLLM's worker; `hand_over_experts` is called on every rank by its name."""

    model_runner: CPUModelRunner
    vllm_config: VllmConfig

    def hand_over_experts(self) -> None:
        """Listen to the routers from the next step on."""
        runner = self.model_runner
        connector = get_aux_output_connector(
            model=runner.get_model(),
            vllm_config=self.vllm_config,
            kv_cache_config=runner.kv_cache_config,
        )
        _ConnectedRunner(runner, connector)


@dataclass(frozen=True)
class _Scheduled:
    """What the connector reads of a step's requests; each has tokens behind the one before."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray  # [requests + 1]
    num_computed_tokens_np: np.ndarray  # [requests], tokens before the step's


class _ConnectedRunner:
    """Stands between vLLM's worker and its runner, which answers each step before the next one."""

    def __init__(self, runner: CPUModelRunner, connector: AuxOutputWorkerConnector) -> None:
        self._runner, self._connector = runner, connector
        self._execute: Callable[..., Any] = runner.execute_model
        self._sample: Callable[..., Any] = runner.sample_tokens
        self._num_tokens: dict[str, int] = {}
        vars(runner).update(execute_model=self.execute_model, sample_tokens=self.sample_tokens)

    def execute_model(self, scheduled: SchedulerOutput, *args: object) -> object:
        """As the runner's, while its routers are listened to."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        self._num_tokens = scheduled.num_scheduled_tokens
        return self._execute(scheduled, *args)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """As the runner's, with the experts of the step's tokens."""
        # sampling counts the step's tokens among the computed ones
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
