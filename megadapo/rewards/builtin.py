"""Reward functions that come with megadapo; each is called like a user's function."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megadapo.rewards.dapo_math import Rule, score
from megadapo.rewards.steps import split_steps
from megadapo.rewards.unit_tests import last_block

Messages = Sequence[Mapping[str, str]]
"""The prompt's chat messages, each with its role and content."""

STEP_SEPARATORS = (";", "\n")
"""Ends of a step in a worked sum."""
_SUM = re.compile(r"\s*([0-9]{1,9})\+([0-9]{1,9})=([0-9]{1,9})[;\s]*")
_ANSWER = re.compile(r"\s*Answer:.*", re.S)


def format_reward(
    response: str,
    *,
    pattern: str | None = None,
    json_keys: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return 1 for a response in the required format, else 0.

    Args:
        pattern: a regular expression that must match the whole response, line breaks included. If
            matching takes too long, the function fails.
        json_keys: keys that the JSON object in the response, or in its last fenced block of JSON,
            must have.
    """
    parts = {}
    if pattern is not None:
        parts["pattern"] = float(re.fullmatch(pattern, response, re.S) is not None)
    if json_keys is not None:
        parts["json"] = float(_has_keys(response, json_keys))
    return {"score": min(parts.values(), default=1.0), **parts}


def _has_keys(response: str, keys: Sequence[str]) -> bool:
    fenced = last_block(response, ("json",))
    try:
        value = json.loads(response if fenced is None else fenced)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in keys)


def length_reward(
    tokens: Sequence[int],
    *,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    buffer: int = 0,
    alpha_len: float = 0.0,
) -> float:
    """Return -alpha_len times the length, less up to 1 outside of min_tokens to max_tokens.

    Args:
        max_tokens: None: no upper bound.
        buffer: number of tokens beyond either bound over which that part falls linearly to -1.
        alpha_len: cost of a token.
    """
    longest = len(tokens) if max_tokens is None else max_tokens
    excess = max(len(tokens) - longest, min_tokens - len(tokens), 0)
    outside = min(1.0, excess / buffer) if buffer > 0 else float(excess > 0)
    return 0.0 - outside - alpha_len * len(tokens)


def hierarchical_reward(
    response: str,
    ground_truth: str,
    *,
    tools: Sequence[str],
    bonus: float = 0.1,
    pattern: str = "",
    rule: Rule = "answer",
) -> dict[str, float | bool]:
    """Return ARPO's reward (arXiv 2507.19849, equation 8) with parts format and used_tools.

    It is -1 for a wrong format, else 0 for an incorrect answer, else 1, plus the bonus if the
    response used every tool.

    Args:
        tools: for each tool a text that every response with a call of it has.
        pattern: a regular expression that must match the whole response; "" allows any format.
        rule: place of the answer.
    """
    correct = bool(score(response, ground_truth, rule).correct)
    has_format = not pattern or re.fullmatch(pattern, response, re.S) is not None
    used_tools = all(tool in response for tool in tools)
    found = correct * (1.0 + bonus * used_tools) if has_format else -1.0
    parts = {"format": float(has_format), "used_tools": float(used_tools)}
    return {"score": found, "correct": correct, **parts}


def arithmetic_steps_reward(
    messages: Messages,
    response: str,
    ground_truth: str,
) -> dict[str, Any]:
    """Return 1 or 0 for each step of a worked sum; DAPO's rule decides about the answer.

    A worked sum of 12+34+56 is `12+34=46;46+56=102` and below it `Answer: 102`, as
    `data.arithmetic.worked_answer` writes it. A partial sum is right if it correctly adds the next
    term to the total written before it. So a slip costs only its own step. Any other text is wrong,
    and so is a step after the last term or after an answer.
    """
    correct = bool(score(response, ground_truth).correct)
    terms = [int(term) for term in re.findall("[0-9]+", messages[-1]["content"])]
    texts = split_steps(response, STEP_SEPARATORS)
    return {"steps": list(_step_scores(texts, terms, correct)), "correct": correct}


def _step_scores(steps: Sequence[str], terms: Sequence[int], correct: bool) -> Iterator[float]:
    total, *ahead = terms
    answered = False
    for step in steps:
        found = _SUM.fullmatch(step)
        if answered or (found is None and not _ANSWER.fullmatch(step)):
            yield 0.0
        elif found is None:
            answered = True
            yield float(correct)
        elif not ahead:
            yield 0.0
        else:
            left, term, written = map(int, found.groups())
            yield float((left, term, written) == (total, ahead.pop(0), left + term))
            total = written
