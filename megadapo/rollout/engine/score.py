"""Log-probs of given tokens under an engine's current weights.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.rollout.types import ScoreRequest, sampled_logprobs

PRIORITY = -(1 << 31)
"""A priority before every training group: a score takes the next free slot."""


async def score(
    llm: AsyncLLM, requests: Sequence[ScoreRequest], *, policy_version: int, wait_s: float
) -> list[np.ndarray] | None:
    """Return the log-probs of each request's tokens, [n] float32; None after `wait_s` seconds.

    No request of it is running afterwards, so an update of the weights may follow.
    """
    # the cache must return neither keys of other weights nor, to generation, keys of a score: how
    # much a response finds in the cache must not depend on what is scored
    salt = f"score-{policy_version}"
    calls: list[list[RequestOutputCollector]] = []
    for request in requests:
        calls.append([])
        for prompt, params in _vllm_requests(request, salt):
            name = f"{salt}-{len(calls)}-{len(calls[-1])}"
            call = await llm.add_request(name, prompt, params, priority=PRIORITY)
            calls[-1].append(call)
    collectors = [call for own in calls for call in own]
    try:
        await asyncio.wait_for(_outputs(collectors), wait_s)
    except TimeoutError:
        # the core sends an end for each of them, which `_outputs` waits for
        await llm.engine_core.abort_requests_async(
            [collector.request_id for collector in collectors]
        )
        await _outputs(collectors)
        return None
    return [
        _logprobs(request, [cast(RequestOutput, call.output) for call in own])
        for request, own in zip(requests, calls, strict=True)
    ]


def _vllm_requests(
    request: ScoreRequest, salt: str
) -> Iterator[tuple[TokensInput, SamplingParams]]:
    """Yield one request for all tokens, or one for each.

    vLLM gives the log-probs of a prompt at temperature 1 only; at another temperature the log-prob
    of a token is exact where the token is the next one to sample.
    """
    ids = list(request.token_ids)
    if request.in_one_pass:
        yield tokens_input(ids, cache_salt=salt), _params(request, prompt_logprobs=0)
        return
    for position in request.positions.tolist():
        params = _params(request, logprob_token_ids=[ids[position]])
        yield tokens_input(ids[:position], cache_salt=salt), params


def _params(
    request: ScoreRequest,
    *,
    prompt_logprobs: int | None = None,
    logprob_token_ids: list[int] | None = None,
) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        # vLLM samples at least one token, which is not used
        max_tokens=1,
        seed=0,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=logprob_token_ids,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


async def _outputs(collectors: Sequence[RequestOutputCollector]) -> None:
    """Wait until every request has its output, and leave it in the collector."""
    for collector in collectors:
        await collector.ready.wait()
        if isinstance(collector.output, Exception):
            raise collector.output


def _logprobs(request: ScoreRequest, outputs: Sequence[RequestOutput]) -> np.ndarray:
    ids = request.token_ids
    if request.in_one_pass:
        table = cast(FlatLogprobs | None, outputs[0].prompt_logprobs)  # because of flat_logprobs
        values: np.ndarray = sampled_logprobs(ids, table)[request.positions]
        return values
    pairs = zip(request.positions.tolist(), outputs, strict=True)
    found = [
        sampled_logprobs([ids[position]], cast(FlatLogprobs | None, output.outputs[0].logprobs))
        for position, output in pairs
    ]
    return np.concatenate(found)
