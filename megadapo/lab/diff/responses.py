"""Differences between a response of one run and the same response of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megadapo.data.group import Response
from megadapo.lab.diff.difference import Row, count, differing_rows, row
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse


def first_difference(one: np.ndarray | None, two: np.ndarray | None) -> int | None:
    """Return the first index at which two arrays differ in a bit or end; None if none does."""
    if one is None or two is None:
        return None if one is two else 0
    length = min(len(one), len(two))
    kinds = [values[:length].astype(values.dtype.newbyteorder("=")) for values in (one, two)]
    bits = [values.view(np.int32) for values in kinds]
    places = np.flatnonzero(bits[0] != bits[1])
    if len(places):
        return int(places[0])
    return None if len(one) == len(two) else length


def token_advantages(saved: SavedResponse) -> np.ndarray:
    """Return the [n] float32 advantages of the tokens, also if all tokens have the same one."""
    if saved.advantages is not None:
        return saved.advantages
    value = np.nan if saved.advantage is None else saved.advantage
    return np.full(len(saved.response.token_ids), value, dtype=np.float32)


def rollout_place(one: SavedResponse, two: SavedResponse) -> tuple[int, str] | None:
    """Return the first token at which two responses differ, and the differing value.

    A value of the whole response counts as one after its last token.
    """
    a, b = one.response, two.response
    found = [
        (place, order, field)
        for order, (field, x, y) in enumerate(
            [
                ("token", a.token_ids, b.token_ids),
                ("policy version", a.policy_versions, b.policy_versions),
                ("engine log-prob", a.logprobs, b.logprobs),
            ]
        )
        if (place := first_difference(x, y)) is not None
    ]
    if not found:
        rows = whole_rows(a, b)
        return (len(a.token_ids), rows[0][0]) if rows else None
    place, _, field = min(found)
    return place, field


def whole_rows(a: Response, b: Response) -> tuple[Row, ...]:
    """Return the differing values of two whole responses."""
    return differing_rows(
        (name, x, y) for (name, x), (_, y) in zip(_whole(a), _whole(b), strict=True)
    )


def _whole(response: Response) -> list[tuple[str, Any]]:
    """Return the values of a whole response; NaN as text, which equals itself."""
    experts = response.experts
    return [
        ("finish reason", response.finish_reason),
        ("text", response.text),
        ("branch", response.branch),
        ("tool calls", repr(response.turns)),
        ("entropy", repr(response.entropy)),
        ("experts", None if experts is None else (experts.shape, experts.tobytes())),
    ]


def token_rows(one: SavedResponse, two: SavedResponse, place: int) -> list[Row]:
    """Return the values of a token, and of its response, in both runs."""

    def values(saved: SavedResponse) -> list[object]:
        response, length = saved.response, len(saved.response.token_ids)
        own: list[object] = ["ended", None, None]
        if place < length:
            token = f"{response.token_ids[place]} {saved.tokens[place]!r}"
            own = [token, response.policy_versions[place], response.logprobs[place]]
        return [*own, f"{length}, {response.finish_reason}"]

    names = ("token", "policy version", "engine log-prob", "length, end")
    return [row(*three) for three in zip(names, values(one), values(two), strict=True)]


def about_tokens(one: SavedResponse, two: SavedResponse, place: int, field: str) -> list[str]:
    """Return the evidence about the cause of a response's first difference."""
    a, b = one.response, two.response
    length = min(len(a.token_ids), len(b.token_ids))
    same_tokens = np.array_equal(a.token_ids, b.token_ids)
    same_logprobs = first_difference(a.logprobs, b.logprobs) is None
    if field == "policy version" and same_tokens:
        num = int((a.policy_versions != b.policy_versions).sum())
        if same_logprobs:
            return [
                f"Only the label differs, on {count(num, 'token')}: tokens and log-probs are equal."
            ]
        return [f"{count(num, 'token')} are from other weights."]
    if field == "engine log-prob":
        first = first_difference(a.token_ids, b.token_ids)
        others = (
            "all tokens are equal" if first is None else f"token {first + 1} is the first other"
        )
        return [f"The engines computed other log-probs for equal tokens; {others}."]
    if field != "token":
        return ["The tokens are equal."]
    if same_logprobs:
        return ["All log-probs of the response are equal: the token was changed after sampling."]
    later = int((a.token_ids[place + 1 : length] == b.token_ids[place + 1 : length]).sum())
    num_later = max(0, length - place - 1)
    before = f"The {count(place, 'token')} before it and their log-probs are equal"
    start = (
        "The responses part at their first token"
        if place == 0
        else f"{before}: the weights were the same, the noise was not"
    )
    return [f"{start}. {later} of {count(num_later, 'later token')} agree."]


def moved_group(
    index: int,
    a: Mapping[int, SavedGroup],
    b: Mapping[int, SavedGroup],
    content: Callable[[SavedGroup], object],
) -> str:
    """Return a sentence if a group has another prompt index in B."""
    here, there = content(a[index]), content(b[index])
    if here == there:
        return ""
    in_b = next((i for i in sorted(b) if content(b[i]) == here), None)
    in_a = next((i for i in sorted(a) if content(a[i]) == there), None)
    if in_a is not None and in_a == in_b:
        return f"B has the groups {index} and {in_a} swapped."
    if in_a is not None:
        return f"Group {in_a} of A is group {index} of B."
    return "" if in_b is None else f"Group {index} of A is group {in_b} of B."


def swapped_responses(index: int, one: SavedGroup, two: SavedGroup) -> str:
    """Return a sentence if B has the response at another place of its group, in an exchange.

    Equal responses alone are no evidence: short ones often are equal.
    """
    a, b = tokens_of_group(one), tokens_of_group(two)
    for other in range(min(len(a), len(b))):
        if other != index and (a[index], a[other]) == (b[other], b[index]):
            return f"B has the responses {index + 1} and {other + 1} swapped."
    return ""


def tokens_of(saved: SavedResponse) -> tuple[int, ...]:
    return tuple(saved.response.token_ids.tolist())


def tokens_of_group(group: SavedGroup) -> tuple[tuple[int, ...], ...]:
    return tuple(tokens_of(saved) for saved in group.responses)


def values_of_score(saved: SavedResponse) -> list[tuple[str, Any]]:
    score = saved.score
    return [
        ("reward", score.reward),
        ("correct", score.correct),
        ("answer", score.answer),
        ("rule", saved.rule_correct),
        ("cross-check", score.symbolic_correct),
        ("parts", score.parts),
        ("steps", score.steps),
        ("penalty", saved.penalty),
        ("shaped reward", saved.shaped_reward),
    ]
