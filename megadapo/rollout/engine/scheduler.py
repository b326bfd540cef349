"""A vLLM scheduler that sends tokens in batches to the actor.

vLLM sends the output of every step for every request, each log-prob as an array of its own. With a
hundred short steps per second that is a seventh of the work of both processes, although responses
are read only when they are complete. Written for vLLM 0.32; it runs in vLLM's core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

HELD_S = 0.1
"""Approximate time for which tokens are held back. A stopped response loses them. The engine still
seems to make progress, since rollout.engine_progress_timeout_s is far longer."""

_TOKENS = ("request_id", "new_token_ids", "new_logprobs")
_REST = [
    (field.name, field.default)
    for field in msgspec.structs.fields(EngineCoreOutput)
    if field.name not in _TOKENS
]


class HeldTokens:
    """The tokens of each request that are held back."""

    def __init__(self) -> None:
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._since: dict[str, int] = {}
        """Period of the first output of each request that is held back."""

    def take(
        self, output: EngineCoreOutput, *, period: int, at_once: bool = False
    ) -> EngineCoreOutput | None:
        """Add an output; return all held ones joined if they are due, else None.

        They are due in the period after the first one. Periods are the same for all requests, so
        that most requests share their messages. An output with more than tokens, such as the end of
        a response, is due at once.
        """
        name = output.request_id
        held = self._held.setdefault(name, [])
        held.append(output)
        is_due = at_once or self._since.setdefault(name, period) != period
        if not is_due and all(getattr(output, field) is default for field, default in _REST):
            return None
        self.forget([name])
        return _joined(held)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the held tokens of requests that have ended."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._since.pop(request_id, None)


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last output with the tokens of all."""
    last = outputs[-1]
    if len(outputs) > 1:
        logprobs = [one.new_logprobs for one in outputs if one.new_logprobs is not None]
        last.new_token_ids = [token for one in outputs for token in one.new_token_ids]
        if logprobs:
            last.new_logprobs = LogprobsLists(
                np.concatenate([one.logprob_token_ids for one in logprobs]),
                np.concatenate([one.logprobs for one in logprobs]),
                np.concatenate([one.sampled_token_ranks for one in logprobs]),
            )
    return last


class BatchingScheduler(Scheduler):
    """A scheduler that holds tokens back for HELD_S seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens = HeldTokens()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        period = int(time.monotonic() / HELD_S)
        for outputs in by_client.values():
            taken = [
                self._tokens.take(one, period=period, at_once=self._has_stop_texts(one.request_id))
                for one in outputs.outputs
            ]
            outputs.outputs = [one for one in taken if one is not None]
        return by_client

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        self._tokens.forget(request.request_id for request in finished)
        return finished

    def _has_stop_texts(self, request_id: str) -> bool:
        """Return whether the request has stop texts, which vLLM looks for in the actor."""
        request = self.requests.get(request_id)
        return request is not None and bool(
            request.sampling_params and request.sampling_params.stop
        )
