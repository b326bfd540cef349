"""Saved groups for the tests of what writes, reads and shows them."""

from __future__ import annotations

import math

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, SavedResponse


def saved_response(text: str = "1 + 1 = 2", **values: object) -> SavedResponse:
    """A trained response whose tokens are its characters."""
    size = len(text)
    logprobs = -np.linspace(0.1, 3.0, size, dtype=np.float32)
    defaults = {
        "text": text,
        "token_ids": np.array([ord(c) for c in text], dtype=np.int32),
        "tokens": tuple(text),
        "logprobs_rollout": logprobs,
        "logprobs_old": logprobs * np.float32(1.01),
        "logprobs_update": logprobs * np.float32(0.99),
        "finish_reason": "stop",
        "policy_versions": np.full(size, 3, dtype=np.int32),
        "reward": 1.0,
        "penalty": -1 / 3,
        "shaped_reward": 1.0 - 1 / 3,
        "advantage": 0.1 + 0.2,
        "correct": True,
        "answer": "2",
        "rule_correct": values.get("correct", True),
        "symbolic_correct": True,
    }
    return SavedResponse(**{**defaults, **values})


def untrained(text: str, **values: object) -> SavedResponse:
    """A response that no update saw."""
    nothing = {"logprobs_old": None, "logprobs_update": None, "advantage": None}
    return saved_response(text, **nothing, **values)


def saved_group(
    *responses: SavedResponse, step: int = 4, order: int = 7, fate: Disposition = "trained"
) -> SavedGroup:
    return SavedGroup(
        step=step,
        order=order,
        fate=fate,
        from_reserve=False,
        prompt=Prompt(f"id-{order}", (("system", "Add."), ("user", "1+1=?")), "2", "test"),
        prompt_ids=(5, 151_000, 7),
        responses=responses or (saved_response(), saved_response("3", correct=False, reward=-1.0)),
    )


def awkward_group(order: int = 0) -> SavedGroup:
    """Responses without a token, with lost log-probs, and with text that breaks naive writers."""
    broken = np.array([math.nan, -1e-30, -3.4e38, -0.1], dtype=np.float32)
    return saved_group(
        untrained("", finish_reason="length", symbolic_correct=None, answer="[INVALID]"),
        saved_response(
            "a\n\u2028\x00",
            logprobs_rollout=broken,
            logprobs_old=broken,
            advantages=broken,
            reward_parts={"judge": 0.1, "judge/<b>": -1.0},
            steps=((1, 0.1), (4, -1.0)),
        ),
        untrained("\x1b[2J\ud800</script>", correct=False, reward=-1.0),
        order=order,
        fate="to_reserve",
    )
