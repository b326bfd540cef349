"""vLLM's schedulers, sending tokens in batches to the actor.

vLLM sends the output of every step for every request, each log-prob as an array of its own. With
many responses that is milliseconds of both processes in every step, although responses are read
only when they are complete. Written for vLLM 0.32; it runs in vLLM's core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

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
        request = self.requests.get(request_id)
        return request is not None and bool(
            request.sampling_params and request.sampling_params.stop
        )


class AsyncBatchingScheduler(BatchingScheduler, AsyncScheduler):
    """The same for asynchronous scheduling, which plans a step while the last one runs."""


def scheduler_class(config: SchedulerConfig) -> type[BatchingScheduler]:
    """Return the scheduler that fits vLLM's completed configuration."""
    return AsyncBatchingScheduler if config.async_scheduling else BatchingScheduler
