"""Reward functions that come with megadapo; each is called as a user's would be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, str]]
"""The prompt's chat messages, each with its role and content."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)


def format_reward(
    messages: Messages,
    response: str,
    tokens: Sequence[int],
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    pattern: str | None = None,
    json_keys: Sequence[str] | None = None,
) -> dict[str, float]:
    """1 for a response of the asked form, else 0.

    Args:
        pattern: a regular expression that the whole response matches, line breaks included; what
            takes too long to match is a failure.
        json_keys: the response, or the last fenced block of it, is a JSON object with these keys.
    """
    parts = {}
    if pattern is not None:
        parts["pattern"] = float(re.fullmatch(pattern, response, re.S) is not None)
    if json_keys is not None:
        parts["json"] = float(_has_keys(response, json_keys))
    return {"score": min(parts.values(), default=1.0), **parts}


def _has_keys(response: str, keys: Sequence[str]) -> bool:
    fenced = _FENCED.findall(response)
    try:
        value = json.loads(fenced[-1] if fenced else response)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in keys)


def length_reward(
    messages: Messages,
    response: str,
    tokens: Sequence[int],
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    max_tokens: int,
    min_tokens: int = 0,
    buffer: int = 0,
) -> float:
    """0 for a length from min_tokens to max_tokens, -1 outside, linear over `buffer` tokens.

    Args:
        buffer: tokens beyond either bound over which the score falls to -1.
    """
    excess = max(len(tokens) - max_tokens, min_tokens - len(tokens), 0)
    if excess == 0:
        return 0.0
    return -min(1.0, excess / buffer) if buffer > 0 else -1.0
