"""What is held back of an engine's tokens, and that nothing of them is lost or changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from megadapo.rollout.engine.scheduler import Pieces


def output(request_id: str, *tokens: int, **rest: Any) -> EngineCoreOutput:
    ids = np.array(tokens, dtype=np.int32)[:, None]
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.zeros(len(tokens), dtype=np.int32))
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=list(tokens), new_logprobs=logprobs, **rest
    )


def test_tokens_wait_until_they_are_due_and_come_with_their_logprobs() -> None:
    pieces = Pieces()
    assert pieces.take(output("a", 1), period=7) is None
    assert pieces.take(output("b", 9), period=7) is None
    assert pieces.take(output("a", 2, 3), period=7) is None
    whole = pieces.take(output("a", 4), period=8)
    assert whole is not None and whole.new_token_ids == [1, 2, 3, 4]
    assert whole.new_logprobs is not None
    assert whole.new_logprobs.logprobs[:, 0].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert whole.new_logprobs.logprob_token_ids[:, 0].tolist() == [1, 2, 3, 4]
    assert len(whole.new_logprobs.sampled_token_ranks) == 4
    assert pieces.take(output("a", 5), period=8) is None
    after = pieces.take(output("a", 6), period=8, at_once=True)
    assert after is not None and after.new_token_ids == [5, 6]


def test_requests_of_steps_that_alternate_all_get_their_tokens() -> None:
    """Stages of an engine work on different requests in turn; one batch must not starve another."""
    pieces, got = Pieces(), {"a": 0, "b": 0}
    for number in range(40):
        for name in ("a", "b")[:: 1 if number % 2 else -1]:
            whole = pieces.take(output(name, number), period=number // 3)
            got[name] += 0 if whole is None else len(whole.new_token_ids)
    assert min(got.values()) > 35


def test_an_end_is_handed_over_at_once_with_all_that_was_held() -> None:
    """Else a response would lack its last tokens, or wait for a next step that never comes."""
    pieces = Pieces()
    assert pieces.take(output("a", 1), period=7) is None
    end = EngineCoreOutput(
        request_id="a", new_token_ids=[], finish_reason=FinishReason.ABORT, stop_reason="gone"
    )
    whole = pieces.take(end, period=7)
    assert whole is not None and whole.new_token_ids == [1]
    assert whole.finish_reason == FinishReason.ABORT and whole.stop_reason == "gone"
    assert whole.new_logprobs is not None and whole.new_logprobs.logprobs.tolist() == [[-1.0]]


def test_whatever_else_an_output_says_is_not_held_back() -> None:
    experts = np.zeros((1, 2, 2), dtype=np.uint8)
    for rest in ({"routed_experts": experts}, {"num_nans_in_logits": 3}, {"events": []}):
        whole = Pieces().take(output("a", 1, **rest), period=7)
        assert whole is not None and whole.new_token_ids == [1]


def test_nothing_is_kept_of_a_request_that_was_stopped() -> None:
    """Another one may get its number, and memory must not grow with those that were stopped."""
    pieces = Pieces()
    assert pieces.take(output("a", 1), period=7) is None
    pieces.forget(["a", "unknown"])
    assert pieces.take(output("a", 2), period=8) is None
    whole = pieces.take(output("a", 3), period=9)
    assert whole is not None and whole.new_token_ids == [2, 3]
