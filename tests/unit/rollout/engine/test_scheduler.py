"""Tokens that the scheduler holds back arrive late, complete and unchanged."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from megadapo.rollout.engine.scheduler import HeldTokens


def output(request_id: str, *tokens: int, **rest: Any) -> EngineCoreOutput:
    ids = np.array(tokens, dtype=np.int32)[:, None]
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.zeros(len(tokens), dtype=np.int32))
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=list(tokens), new_logprobs=logprobs, **rest
    )


def test_due_tokens_come_with_their_logprobs() -> None:
    held = HeldTokens()
    for name in ("a", "b"):
        first = held.take(output(name, 1), period=7)
        assert first is not None and first.new_token_ids == [1]
    assert held.take(output("b", 9), period=7) is None
    assert held.take(output("a", 2, 3), period=7) is None
    joined = held.take(output("a", 4), period=8)
    assert joined is not None and joined.new_token_ids == [2, 3, 4]
    assert joined.new_logprobs is not None
    assert joined.new_logprobs.logprobs[:, 0].tolist() == [-2.0, -3.0, -4.0]
    assert joined.new_logprobs.logprob_token_ids[:, 0].tolist() == [2, 3, 4]
    assert len(joined.new_logprobs.sampled_token_ranks) == 3
    assert held.take(output("a", 5), period=8) is None
    after = held.take(output("a", 6), period=8, at_once=True)
    assert after is not None and after.new_token_ids == [5, 6]


def test_steps_longer_than_a_period_are_not_held_back() -> None:
    """A slow engine would seem to make progress in every second step only."""
    held = HeldTokens()
    for step in range(5):
        sent = held.take(output("a", step), period=step)
        assert sent is not None and sent.new_token_ids == [step]


def test_requests_of_alternating_steps_all_get_their_tokens() -> None:
    """Pipeline stages alternate between batches; one batch must not starve another."""
    held, got = HeldTokens(), {"a": 0, "b": 0}
    for number in range(40):
        for name in ("a", "b")[:: 1 if number % 2 else -1]:
            joined = held.take(output(name, number), period=number // 3)
            got[name] += 0 if joined is None else len(joined.new_token_ids)
    assert min(got.values()) > 35


def test_other_logprobs_of_a_step_are_dropped() -> None:
    """A step with another request's top log-probs has more columns; joining them would fail."""
    held, wide = HeldTokens(), output("a", 2)
    table = wide.new_logprobs
    assert table is not None
    wide.new_logprobs = table._replace(
        logprob_token_ids=np.array([[2, 8, 9]]), logprobs=np.array([[-2.0, -0.1, -0.2]])
    )
    held.take(output("a", 1), period=7)
    assert held.take(wide, period=7) is None
    joined = held.take(output("a", 3), period=8)
    assert joined is not None and joined.new_logprobs is not None
    assert joined.new_logprobs.logprobs.tolist() == [[-2.0], [-3.0]]
    assert joined.new_logprobs.logprob_token_ids.tolist() == [[2], [3]]


def test_end_of_response_comes_at_once_with_all_held_tokens() -> None:
    """The response would lack its last tokens, or wait for a step that never comes."""
    held = HeldTokens()
    held.take(output("a", 0), period=7)
    assert held.take(output("a", 1), period=7) is None
    end = EngineCoreOutput(
        request_id="a", new_token_ids=[], finish_reason=FinishReason.ABORT, stop_reason="gone"
    )
    joined = held.take(end, period=7)
    assert joined is not None and joined.new_token_ids == [1]
    assert joined.finish_reason == FinishReason.ABORT and joined.stop_reason == "gone"
    assert joined.new_logprobs is not None and joined.new_logprobs.logprobs.tolist() == [[-1.0]]


def test_outputs_with_more_than_tokens_are_not_held_back() -> None:
    for rest in ({"prompt_token_id_logprobs": torch.zeros(1, 2)}, {"num_nans_in_logits": 3}):
        held = HeldTokens()
        held.take(output("a", 0), period=7)
        joined = held.take(output("a", 1, **rest), period=7)
        assert joined is not None and joined.new_token_ids == [1]


def test_experts_are_joined() -> None:
    held = HeldTokens()
    for number in range(4):
        experts = np.full((1, 2, 2), number, dtype=np.uint8)
        joined = held.take(output("a", number, routed_experts=experts), period=number // 3)
    assert joined is not None and joined.routed_experts is not None
    assert joined.routed_experts[:, 0, 0].tolist() == joined.new_token_ids == [1, 2, 3]


def test_tokens_of_ended_requests_are_dropped() -> None:
    """Another request may reuse the number, and memory must not grow."""
    held = HeldTokens()
    held.take(output("a", 1), period=7)
    end = held.take(output("a", 2, finish_reason=FinishReason.STOP), period=7)
    assert end is not None and end.new_token_ids == [2]
    first = held.take(output("a", 3), period=7)
    assert first is not None and first.new_token_ids == [3]
