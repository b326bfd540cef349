"""Responses made by several requests, with vLLM's own output types, and branching points.

Missing or doubled experts of a token would shift those of all later tokens.
"""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megadapo.algorithm.groups import Branch
from megadapo.data.group import Response, Turn
from megadapo.errors import InfraError
from megadapo.rollout.config import BranchingConfig, SamplingConfig
from megadapo.rollout.engine import in_flight
from megadapo.rollout.engine.in_flight import choose_branches, normalized_entropy, response_prefix
from megadapo.rollout.types import OpenGroup, SamplingSettings

PROMPT = (3, 4, 5)
MAX_TOKENS = 12
ON = BranchingConfig(initial_rollouts=2)


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


def table(*positions: list[float]) -> SimpleNamespace:
    """Return a table; each position has the probabilities of the sampled and the top tokens."""
    ends = np.cumsum([len(position) for position in positions]).tolist()
    logs = [math.log(p) if p else -math.inf for position in positions for p in position]
    return SimpleNamespace(
        start_indices=[0, *ends][: len(ends)],
        end_indices=ends,
        token_ids=[0] * len(logs),
        logprobs=logs,
    )


def response(start: float, *calls: tuple[int, float], branch: Branch | None = None) -> Response:
    return Response(
        token_ids=np.zeros(40, dtype=np.int32),
        logprobs=np.zeros(40, dtype=np.float32),
        finish_reason="stop",
        text="",
        policy_versions=np.zeros(40, dtype=np.int32),
        turns=tuple(Turn(end=end, entropy=entropy) for end, entropy in calls),
        entropy=start,
        branch=branch,
    )


def branches(responses: list[Response], config: BranchingConfig = ON, **numbers: int):
    seeds = range(100, 100 + len(responses))
    return choose_branches(responses, seeds, config, **{"num_seen": 0, "num_left": 9, **numbers})


def test_entropy_is_the_mean_of_the_first_positions_divided_by_log_v():
    """The sampled token is not counted twice; a token of probability 0 adds 0."""
    positions = table([0.5, 0.5, 0.25], [0.1, 1.0, 0.0], [0.9, 0.3, 0.3])
    first = 0.5 * math.log(2) + 0.25 * math.log(4)
    found = normalized_entropy(positions, num_tokens=2, vocab_size=16)
    assert found == pytest.approx((first + 0.0) / 2 / math.log(16))
    uniform = table([0.25] * 5)
    assert normalized_entropy(uniform, num_tokens=20, vocab_size=4) == pytest.approx(1.0)
    assert math.isnan(normalized_entropy(table(), num_tokens=20, vocab_size=4))


def test_responses_branch_at_entropy_rises_call_by_call(monkeypatch):
    """First calls come before second ones; unmeasured entropies never branch."""
    first = response(0.1, (10, 0.2), (20, 0.1), (30, 0.3))
    second = response(0.1, (12, 0.05), (22, 0.4), (32, math.nan))
    expected = [Branch(0, 10), Branch(1, 22), Branch(0, 30)]
    assert branches([first, second]) == expected
    assert branches([first, second], num_left=2) == expected[:2]
    wide = ON.model_copy(update={"beam_size": 3})
    assert branches([first, second], wide, num_left=5) == [
        *[Branch(0, 10)] * 2,
        *[Branch(1, 22)] * 2,
        Branch(0, 30),
    ]
    # alpha + beta dH with the paper's 0.5 and 0.2: rises of 0.1, 0.2 and 0.3 give 0.52, 0.54, 0.56
    for threshold, num_left in ((0.519, 3), (0.521, 2), (0.541, 1), (0.559, 1), (0.561, 0)):
        monkeypatch.setattr(in_flight, "THRESHOLD", threshold)
        assert len(branches([first, second])) == num_left
    monkeypatch.undo()
    unmeasured = response(math.nan, (10, 0.9))
    assert branches([unmeasured]) == [] and branches([]) == []


def test_branch_considers_its_own_calls_only():
    """Its parent's calls and the responses of an earlier round were considered before."""
    parent = response(0.1, (10, 0.2))
    child = response(0.1, (10, 0.9), (25, 0.2), branch=Branch(0, 10))
    assert branches([parent, child], num_seen=1) == [Branch(1, 25)]


def test_draws_use_the_scale_of_the_authors_code():
    """ARPO's code sums the entropy of 20 positions over log V, for which its weight 0.2 was made.
    By the mean, 0.3 nats more at each position would give 0.505 instead of 0.601: a coin flip."""
    rise = 0.3 / math.log(152_064)
    assert 20 * rise == pytest.approx(0.503, abs=5e-4)
    config = BranchingConfig(initial_rollouts=2, decision="draw")
    responses = [response(0.1, (10, 0.1 + rise)) for _ in range(20_000)]
    found = branches(responses, config, num_left=20_000)
    assert branches(responses, config, num_left=20_000) == found
    share = len(found) / 20_000
    assert share == pytest.approx(0.601, abs=4 * math.sqrt(0.601 * 0.399 / 20_000))
    # fewer positions have a smaller sum
    fewer = config.model_copy(update={"num_tokens": 10})
    share = len(branches(responses, fewer, num_left=20_000)) / 20_000
    assert share == pytest.approx(0.550, abs=4 * math.sqrt(0.25 / 20_000))


def test_branching_group_takes_as_many_slots_as_start_at_the_prompt():
    """Counting all of its responses would leave half of the slots empty."""
    plain = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=5)
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=5, branching=ON)
    seeds = (1, 2, 3, 4, 5)
    for one, expected in ((plain, 5), (settings, 2)):
        request = OpenGroup(key=0, prompt_ids=(1,), seeds=seeds, settings=one)
        assert request.num_at_once == expected
    assert SamplingConfig(responses_per_prompt=4, branching=ON).responses_at_once == 2


def test_branch_counts_what_its_environment_counted_in_the_turns_that_it_shares():
    """It counted from its branching point on only, so calls of its parent were missing."""
    turns = [
        Turn(end=end, metrics=(("search/calls", 1.0), ("python/calls", python)))
        for end, python in ((10, 0.0), (20, 2.0), (30, 1.0))
    ]
    whole = replace(response(0.1), turns=tuple(turns))
    assert whole.metrics == {"search/calls": 3.0, "python/calls": 3.0}
    for end, searches, python in ((10, 1.0, 0.0), (25, 2.0, 2.0)):
        found = response_prefix(whole, end, num_prompt=5).metrics
        assert found == {"search/calls": searches, "python/calls": python}
    assert response_prefix(whole, 9, num_prompt=5).metrics == {}
