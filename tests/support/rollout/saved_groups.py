"""Saved groups for tests that write, read and show them."""

import math
from dataclasses import fields

import numpy as np

from megadapo.data.group import Response, Score
from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, SavedResponse


def saved_response(text: str = "1 + 1 = 2", **values: object) -> SavedResponse:
    """Return a trained response whose tokens are its characters.

    `values` replace fields of `Response`, `Score` and `SavedResponse`.
    """
    size = len(text)
    logprobs = -np.linspace(0.1, 3.0, size, dtype=np.float32)
    response = {
        "token_ids": np.array([ord(c) for c in text], dtype=np.int32),
        "logprobs": logprobs,
        "finish_reason": "stop",
        "text": text,
        "policy_versions": np.full(size, 3, dtype=np.int32),
    }
    score = {"reward": 1.0, "correct": True, "answer": "2", "symbolic_correct": True}
    rest = {
        "tokens": tuple(text),
        "logprobs_old": logprobs * np.float32(1.01),
        "logprobs_update": logprobs * np.float32(0.99),
        "penalty": -1 / 3,
        "shaped_reward": 1.0 - 1 / 3,
        "advantage": 0.1 + 0.2,
        "rule_correct": values.get("correct", True),
    }
    names = [{field.name for field in fields(kind)} for kind in (Response, Score)]
    for name, value in values.items():
        part = response if name in names[0] else score if name in names[1] else rest
        part[name] = value
    return SavedResponse(response=Response(**response), score=Score(**score), **rest)


def untrained(text: str, **values: object) -> SavedResponse:
    """Return a response that was not trained on."""
    nothing = {"logprobs_old": None, "logprobs_update": None, "advantage": None}
    return saved_response(text, **nothing, **values)


def saved_group(
    *responses: SavedResponse,
    step: int = 4,
    prompt_index: int = 7,
    disposition: Disposition = "trained",
) -> SavedGroup:
    return SavedGroup(
        step=step,
        prompt_index=prompt_index,
        disposition=disposition,
        from_reserve=False,
        prompt=Prompt(f"id-{prompt_index}", (("system", "Add."), ("user", "1+1=?")), "2", "test"),
        prompt_ids=(5, 151_000, 7),
        responses=responses or (saved_response(), saved_response("3", correct=False, reward=-1.0)),
    )


def awkward_group(prompt_index: int = 0) -> SavedGroup:
    """Return responses without tokens, with lost log-probs, and with text that is hard to write."""
    broken = np.array([math.nan, -1e-30, -3.4e38, -0.1], dtype=np.float32)
    return saved_group(
        untrained("", finish_reason="length", symbolic_correct=None, answer="[INVALID]"),
        saved_response(
            "a\n\u2028\x00",
            logprobs=broken,
            logprobs_old=broken,
            advantages=broken,
            parts=(("judge", 0.1), ("judge/<b>", -1.0)),
            steps=((1, 0.1), (4, -1.0)),
        ),
        untrained("\x1b[2J\ud800</script>", correct=False, reward=-1.0),
        prompt_index=prompt_index,
        disposition="to_reserve",
    )
