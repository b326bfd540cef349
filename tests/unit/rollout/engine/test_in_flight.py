"""Experts and limits of a response made by several requests, with vLLM's own output types.

Missing or doubled experts of a token would shift those of all later tokens.
"""

import asyncio

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megadapo.data.group import Response
from megadapo.errors import InfraError
from megadapo.rollout.engine.in_flight import response_prefix
from megadapo.rollout.types import OpenGroup, SamplingSettings
from tests.support.models.tiny_models import write_tokenizer

PROMPT = (3, 4, 5)
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


class Engine:
    """An engine whose expert numbers are the position and the request that read it.

    Args:
        lengths: number of tokens that each request generates.
        first: number of the first request.
        lost: number of tokens per request whose experts are missing.
    """

    def __init__(self, *lengths: int, end: str = "length", first: int = 0, lost: int = 0) -> None:
        self._lengths, self._end, self._lost = [0] * first + list(lengths), end, lost
        self.limits: list[int] = []
        self.salts: list[str] = []
        self.stops: list[int] = []
        self._number = first

    async def add_request(self, group, prompt, params):
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.limits.append(params.max_tokens)
        self.salts.append(prompt["cache_salt"])
        self.stops = params.stop_token_ids
        length, is_last = self._lengths[self._number], self._number == len(self._lengths) - 1
        end = self._end if is_last else "stop"
        if params.max_tokens < length:
            length, is_last, end = params.max_tokens, True, "length"
        num_read = len(prompt["prompt_token_ids"]) + length - 1
        positions = np.arange(params.routed_experts_prompt_start, num_read - self._lost)
        rows = np.stack([positions, np.full_like(positions, self._number)], axis=1)
        self._number += 1
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=[7] * length,
            cumulative_logprob=None,
            logprobs=None,
            routed_experts=rows[:, None].astype(np.uint8) if length else None,
            finish_reason=end,
            stop_reason=None if is_last else "stop",
        )
        collector = RequestOutputCollector(params.output_kind, str(self._number))
        collector.put(RequestOutput("", None, None, None, [completion], finished=True))
        return collector


def generate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    begun: Response | None = None,
    returns_experts: bool = True,
    until: int | None = None,
    version: int = 0,
) -> Response:
    from megadapo.rollout.engine.in_flight import InFlightGroup, InFlightResponse

    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS, stop_ids=(9, 8))
    group = InFlightGroup(
        request=OpenGroup(key=0, prompt_ids=PROMPT, seeds=(1,), settings=settings),
        policy_version=version,
        add_request=engine.add_request,
        tokenizer=tokenizer,
        vocab_size=50,
        returns_experts=returns_experts,
    )

    async def run() -> Response:
        one = InFlightResponse(group, 1, begun, stop_at=until)
        await one.submit()
        await one.finish()
        return one.response()

    return asyncio.run(run())


def readers(response: Response) -> list[int]:
    """Return the request that read each position; the positions must be in order."""
    assert response.experts is not None
    np.testing.assert_array_equal(response.experts[:, 0, 0], np.arange(len(response.experts)))
    return response.experts[:, 0, 1].tolist()


def test_all_but_the_last_token_have_experts(tokenizer) -> None:
    assert readers(generate(Engine(4), tokenizer)) == [0] * (3 + 4 - 1)
    assert readers(generate(Engine(1), tokenizer)) == [0] * 3
    assert generate(Engine(4), tokenizer, returns_experts=False).experts is None


@pytest.mark.parametrize("first", [0, 1, 4])
def test_continued_response_keeps_its_experts(tokenizer, first: int) -> None:
    begun = generate(Engine(first, end="abort"), tokenizer)
    assert begun.finish_reason == "unfinished"
    later = Engine(5, first=1)
    kept = 3 + first - 1 if first else 0
    assert readers(generate(later, tokenizer, begun=begun)) == [0] * kept + [1] * (7 + first - kept)


def test_tokens_and_cache_have_the_version_of_their_request(tokenizer) -> None:
    """Without it the cache returns keys of older weights, and a token has other log-probs."""
    begun = generate(Engine(3, end="abort"), tokenizer, version=4)
    later = Engine(4, first=1)
    found = generate(later, tokenizer, begun=begun, version=5)
    assert found.policy_versions.tolist() == [4] * 3 + [5] * 4
    assert later.salts == ["5"]


def test_branch_reads_the_last_token_of_its_prefix(tokenizer) -> None:
    parent = generate(Engine(6), tokenizer)
    begun = response_prefix(parent, 4, num_prompt=len(PROMPT))
    later = Engine(2, first=1)
    assert readers(generate(later, tokenizer, begun=begun)) == [0] * (3 + 4 - 1) + [1] * 2


def test_missing_experts_are_an_error(tokenizer) -> None:
    with pytest.raises(InfraError, match="experts of 5 tokens, but read 6"):
        generate(Engine(4, lost=1), tokenizer)


def test_request_stops_at_the_stop_tokens(tokenizer) -> None:
    """vLLM finds some of them by itself, but not the end of a turn in the chat template."""
    engine = Engine(4)
    generate(engine, tokenizer)
    assert engine.stops == [9, 8]


@pytest.mark.parametrize(("length", "end", "until", "reason"), [
    (20, "length", 5, "unfinished"),
    (5, "stop", 5, "stop"),  # its own last token is there
    (5, "stop", 9, "stop"),
    (20, "length", MAX_TOKENS, "length"),  # the true limit
    (20, "length", MAX_TOKENS + 9, "length"),
])  # fmt: skip
def test_response_stops_at_until(tokenizer, length: int, end: str, until: int, reason: str) -> None:
    """Else a repeated run would stop at another token, or take a stopped response as finished."""
    engine = Engine(length, end=end)
    found = generate(engine, tokenizer, until=until)
    assert found.finish_reason == reason
    assert len(found.token_ids) == min(length, until, MAX_TOKENS)
    assert engine.limits == [min(until, MAX_TOKENS)]


def test_response_at_its_until_is_not_requested(tokenizer) -> None:
    """Catches a request of 0 tokens, which vLLM refuses."""
    engine = Engine(4)
    nothing = generate(engine, tokenizer, until=0)
    assert len(nothing.token_ids) == 0 and nothing.finish_reason == "unfinished"
    begun = generate(Engine(9), tokenizer, until=4)
    kept = generate(engine, tokenizer, begun=begun, until=4)
    assert kept.token_ids.tolist() == begun.token_ids.tolist() and not engine.limits
    longer = generate(engine := Engine(9, first=1), tokenizer, begun=begun, until=7)
    assert len(longer.token_ids) == 7 and engine.limits == [3]
    assert readers(longer) == [0] * (3 + 4 - 1) + [1] * 3
