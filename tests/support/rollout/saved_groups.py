"""Saved groups for tests that write, read and show them."""

import math
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from megadapo.data.group import NO_VERSION, Response, Score, Turn
from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, SavedResponse


def saved_response(characters: str = "1 + 1 = 2", **values: object) -> SavedResponse:
    """Return a trained response whose tokens are its characters.

    `values` replace fields of `Response`, `Score` and `SavedResponse`.
    """
    size = len(characters)
    logprobs = -np.linspace(0.1, 3.0, size, dtype=np.float32)
    response = {
        "token_ids": np.array([ord(c) for c in characters], dtype=np.int32),
        "logprobs": logprobs,
        "finish_reason": "stop",
        "text": characters,
        "policy_versions": np.full(size, 3, dtype=np.int32),
    }
    score = {"reward": 1.0, "correct": True, "answer": "2", "symbolic_correct": True}
    rest = {
        "tokens": tuple(characters),
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


CONTROL = 1000
"""The id of a control token, which `saved_episode` writes for CONTROL_MARK."""
CONTROL_MARK = "\u00a4"


def saved_episode(
    *turns: tuple[str, str, float], last: str = "", environment: str | None = "Game"
) -> SavedResponse:
    """Return a response with turns; its tokens are its characters.

    Args:
        turns: text of the model, the answer, and its reward; each took a quarter of a second.
        last: text of the model behind the last answer.
        environment: its name; None: a tool answers.
    """
    whole, versions, ends = "", [], []
    for action, answer, reward in (*turns, (last, "", None)):
        whole += action + answer
        versions += [3] * len(action) + [NO_VERSION] * len(answer)
        if reward is not None:
            paid = {} if environment is None else {"reward": reward, "seconds": 0.25}
            ends.append(Turn(end=len(whole), **paid))
    earned = sum(turn.reward for turn in ends)
    names = () if environment is None else ((f"environment/{environment}/return", earned),)
    is_sampled = np.array(versions, np.int32) != NO_VERSION
    logprobs = np.where(is_sampled, np.float32(-0.5), np.float32(np.nan))
    pieces = tuple("" if c == CONTROL_MARK else c for c in whole)
    return saved_response(
        whole,
        text="".join(pieces),
        tokens=pieces,
        token_ids=np.array([ord(c) if c != CONTROL_MARK else CONTROL for c in whole], np.int32),
        policy_versions=np.array(versions, np.int32),
        logprobs=logprobs,
        logprobs_old=logprobs,
        logprobs_update=logprobs,
        turns=tuple(ends),
        parts=names,
        reward=earned,
    )


def untrained(text: str, **values: object) -> SavedResponse:
    """Return a response that was not trained on."""
    nothing = {"logprobs_old": None, "logprobs_update": None, "advantage": None}
    return saved_response(text, **nothing, **values)


def saved_group(
    *responses: SavedResponse,
    step: int = 4,
    prompt_index: int = 7,
    disposition: Disposition = "trained",
    control_tokens: Mapping[int, str] | None = None,
) -> SavedGroup:
    return SavedGroup(
        step=step,
        prompt_index=prompt_index,
        disposition=disposition,
        from_reserve=False,
        prompt=Prompt(f"id-{prompt_index}", (("system", "Add."), ("user", "1+1=?")), "2", "test"),
        prompt_ids=(5, 151_000, 7),
        responses=responses or (saved_response(), saved_response("3", correct=False, reward=-1.0)),
        control_tokens=control_tokens or {},
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
