"""Experts of a response that several requests made, with vLLM's own outputs of each.

Catches a token whose experts are missing, there twice, or of a later reading than its first: each
would move those of all tokens behind it.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megadapo.errors import InfraError
from megadapo.rollout.tools import Tool, ToolsConfig
from megadapo.rollout.types import GroupRequest, Response, SamplingSettings
from tests.support.models.tiny_models import write_tokenizer

PROMPT = (3, 4, 5)
MAX_TOKENS = 12


class Told(Tool):
    """Puts out three tokens."""

    def step(self, text: str) -> str | None:
        return "123"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


class Engine:
    """Answers each request with so many tokens; experts say which request read which position."""

    def __init__(self, *lengths: int, end: str = "length", lost: int = 0) -> None:
        self._lengths, self._end, self._lost = list(lengths), end, lost
        self._number = 0

    async def ask(self, prompt, params):
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.v1.engine.output_processor import RequestOutputCollector

        length, is_last = self._lengths[self._number], self._number == len(self._lengths) - 1
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
            finish_reason=self._end if is_last else "stop",
            stop_reason=None if is_last else "stop",
        )
        collector = RequestOutputCollector(params.output_kind, str(self._number))
        collector.put(RequestOutput("", None, None, None, [completion], finished=True))
        return collector


def answer(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    begun: Response | None = None,
    tool: Tool | None = None,
    returns_experts: bool = True,
) -> Response:
    from megadapo.rollout.engine.answering import Answer, GroupContext

    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
    asker = GroupContext(
        group=GroupRequest(key=0, prompt_ids=PROMPT, seeds=(1,), settings=settings),
        policy_version=0,
        ask=engine.ask,
        tool=tool,
        tokenizer=tokenizer,
        vocab_size=50,
        returns_experts=returns_experts,
    )

    async def run() -> Response:
        one = Answer(asker, 1, begun)
        await one.ask()
        await one.finish()
        return one.response()

    return asyncio.run(run())


def readings(response: Response) -> list[int]:
    """The request that each position's experts are of; positions must be in order."""
    assert response.experts is not None
    np.testing.assert_array_equal(response.experts[:, 0, 0], np.arange(len(response.experts)))
    return response.experts[:, 0, 1].tolist()


def test_all_but_the_last_token_have_experts(tokenizer) -> None:
    assert readings(answer(Engine(4), tokenizer)) == [0] * (3 + 4 - 1)
    assert readings(answer(Engine(1), tokenizer)) == [0] * 3
    assert answer(Engine(4), tokenizer, returns_experts=False).experts is None


@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_response_that_goes_on_keeps_the_experts_it_had(tokenizer, first: int) -> None:
    begun = answer(Engine(first, end="abort"), tokenizer)
    assert begun.finish_reason == "unfinished"
    later = Engine(0, 5)
    later._number = 1
    kept = 3 + first - 1 if first else 0
    assert readings(answer(later, tokenizer, begun=begun)) == [0] * kept + [1] * (7 + first - kept)


def test_a_tools_output_has_the_experts_of_the_request_that_read_it(tokenizer) -> None:
    found = answer(Engine(4, 2), tokenizer, tool=Told(ToolsConfig(tool="mark")))
    assert len(found.token_ids) == 4 + 3 + 2
    assert readings(found) == [0] * (3 + 4 - 1) + [1] * (1 + 3 + 2 - 1)


def test_a_branch_reads_its_parents_last_token_itself(tokenizer) -> None:
    from megadapo.rollout.engine.answering import beginning

    parent = answer(Engine(6), tokenizer)
    begun = beginning(parent, 4, num_prompt=len(PROMPT))
    later = Engine(0, 2)
    later._number = 1
    assert readings(answer(later, tokenizer, begun=begun)) == [0] * (3 + 4 - 1) + [1] * 2


def test_an_engine_that_leaves_experts_out_is_noticed(tokenizer) -> None:
    with pytest.raises(InfraError, match="experts of 5 tokens, and read 6"):
        answer(Engine(4, lost=1), tokenizer)
