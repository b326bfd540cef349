"""The JSON form of groups, for the run's state, the journal and saved rollouts.

A group is

    {"prompt_index": int, "prompt": {...}, "prompt_ids": [int, ...], "responses": [{...}, ...],
     "failures": [[function, reason], ...]}

and a response has the fields of its `Response` and its `Score`. In the run's state and the journal
"token_ids" and "logprobs_rollout" are base64 of their exact bytes, which is half the size of
decimal text. In saved rollouts they are lists, with null for a log-prob that is not finite.
Policy versions are runs of equal values, [version, number of tokens].
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megadapo.algorithm.groups import Branch
from megadapo.data.group import NO_VERSION, Failure, Group, Response, Score, Turn
from megadapo.data.prompts import Prompt

MAX_VERSION = int(np.iinfo(np.int32).max)
EXPERT_TYPES = {"uint8": "<u1", "uint16": "<u2"}
"""Names of the types of expert numbers, and how each is stored."""


def encode_group(group: Group) -> dict[str, Any]:
    """Return a group as JSON values; its numbers stay exact."""
    pairs = zip(group.responses, group.scores, strict=True)
    return {
        "prompt_index": group.prompt_index,
        "prompt": group.prompt.to_json(),
        "prompt_ids": list(group.prompt_ids),
        "responses": [encode_response(one) | encode_score(score) for one, score in pairs],
        "failures": [list(failure) for failure in group.failures],
    }


def decode_group(entry: Mapping[str, Any]) -> Group:
    """Return the group that was encoded."""
    responses = tuple(decode_response(response) for response in entry["responses"])
    _check_branches(responses)
    return Group(
        prompt_index=entry["prompt_index"],
        prompt=Prompt.from_json(entry["prompt"]),
        prompt_ids=tuple(entry["prompt_ids"]),
        responses=responses,
        scores=tuple(
            decode_score(one, len(response.token_ids))
            for one, response in zip(entry["responses"], responses, strict=True)
        ),
        failures=tuple(Failure(*map(str, failure)) for failure in entry.get("failures", [])),
    )


def encode_response(response: Response, *, readable: bool = False) -> dict[str, Any]:
    """Return a response as JSON values; `readable`: with numbers as lists, not as base64."""
    token_ids, logprobs = response.token_ids, response.logprobs
    return {
        "text": response.text,
        "token_ids": token_ids.tolist() if readable else _pack(token_ids, "<i4"),
        "logprobs_rollout": encode_floats(logprobs) if readable else _pack(logprobs, "<f4"),
        "finish_reason": response.finish_reason,
        "policy_versions": encode_versions(response.policy_versions),
        "turns": [
            [
                *(turn.end, _finite_or_none(turn.entropy), turn.reward, turn.seconds, turn.is_call),
                dict(turn.metrics),
            ]
            for turn in response.turns
        ],
        "entropy": _finite_or_none(response.entropy),
        "branch": None if response.branch is None else list(response.branch),
        "experts": encode_experts(response.experts),
        "failure": None if response.failure is None else list(response.failure),
    }


def decode_response(entry: Mapping[str, Any]) -> Response:
    """Return the response that was encoded, readable or not.

    Raises:
        KeyError, TypeError, ValueError: the entry is not a response.
    """
    _check_types(entry, {"text": str, "finish_reason": str})
    token_ids = _unpack(entry["token_ids"], "<i4")
    logprobs = _unpack(entry["logprobs_rollout"], "<f4")
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens have {len(logprobs)} log-probs")
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=entry["finish_reason"],
        text=entry["text"],
        policy_versions=decode_versions(entry["policy_versions"], len(token_ids)),
        turns=tuple(map(_decode_turn, entry["turns"] if "turns" in entry else entry["calls"])),
        entropy=_or_nan(entry["entropy"]),
        branch=_decode_branch(entry["branch"]),
        experts=decode_experts(entry["experts"]),
        failure=Failure(*map(str, entry["failure"])) if entry.get("failure") else None,
    )


def encode_score(score: Score) -> dict[str, Any]:
    """Return a score as JSON values."""
    return {
        "reward": score.reward,
        "correct": score.correct,
        "answer": score.answer,
        "symbolic_correct": score.symbolic_correct,
        "reward_parts": dict(score.parts),
        "steps": [list(step) for step in score.steps],
    }


def decode_score(entry: Mapping[str, Any], num_tokens: int) -> Score:
    """Return the score that was encoded, of a response with `num_tokens` tokens.

    Raises:
        KeyError, TypeError, ValueError: the entry is not a score.
    """
    kinds = {"reward": int | float, "correct": bool, "answer": str, "symbolic_correct": bool | None}
    _check_types(entry, kinds)
    steps = tuple((int(end), float(value)) for end, value in entry["steps"])
    ends = [0, *(end for end, _ in steps), num_tokens]
    if ends != sorted(ends):
        raise ValueError(f"steps end at {ends[1:-1]} in a response of {num_tokens} tokens")
    return Score(
        reward=entry["reward"],
        correct=entry["correct"],
        answer=entry["answer"],
        symbolic_correct=entry["symbolic_correct"],
        parts=tuple((name, float(value)) for name, value in entry["reward_parts"].items()),
        steps=steps,
    )


def encode_floats(values: np.ndarray | None) -> list[float | None] | None:
    """Return float32 values in the fewest digits that restore them; null if not finite."""
    if values is None:
        return None
    import pyarrow

    column = pyarrow.array(values.astype(np.float32), mask=~np.isfinite(values))
    # Arrow prints the shortest text of a float32; a Python float has the digits of a float64.
    texts = column.cast(pyarrow.string()).to_pylist()
    return [None if text is None else float(text) for text in texts]


def decode_floats(values: Sequence[float | None] | None) -> np.ndarray | None:
    """Return the [n] float32 values that `encode_floats` wrote, NaN for null."""
    if values is None:
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)


def encode_versions(versions: np.ndarray) -> list[list[int]]:
    """Return [n] versions as runs, [[version, number of tokens], ...]."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff(starts, append=len(versions))
    return [[int(versions[i]), int(n)] for i, n in zip(starts, counts, strict=True)]


def decode_versions(runs: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """Return [num_tokens] int32 versions from their runs.

    Raises:
        TypeError, ValueError: the runs are malformed or do not cover `num_tokens` tokens.
    """
    pairs = [(version, count) for version, count in runs]
    counts = [count for _, count in pairs]
    if min(counts, default=0) < 0 or sum(counts) != num_tokens:
        raise ValueError(f"policy versions {runs} do not cover {num_tokens} tokens")
    if any(not NO_VERSION <= version <= MAX_VERSION for version, _ in pairs):
        raise ValueError(f"policy versions {runs} are not all from {NO_VERSION} to {MAX_VERSION}")
    versions = np.array([version for version, _ in pairs], dtype=np.int32)
    return np.repeat(versions, counts)


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the type that holds the numbers of `num_experts` experts."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def encode_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Return expert numbers [m, layers, experts per token] as JSON values."""
    if experts is None:
        return None
    return {
        "shape": list(experts.shape),
        "dtype": experts.dtype.name,
        "data": _pack(experts, EXPERT_TYPES[experts.dtype.name]),
    }


def decode_experts(entry: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return the array that `encode_experts` wrote.

    Raises:
        KeyError, TypeError, ValueError: the entry is malformed, or routes a token to one expert
            twice.
    """
    if entry is None:
        return None
    tokens, layers, per_token = (int(size) for size in entry["shape"])
    values = np.frombuffer(
        base64.b64decode(entry["data"], validate=True), EXPERT_TYPES[entry["dtype"]]
    )
    if len(values) != math.prod((tokens, layers, per_token)):
        raise ValueError(f"{len(values)} expert numbers do not have the shape {entry['shape']}")
    experts = values.reshape(tokens, layers, per_token).astype(entry["dtype"])
    ascending = np.sort(experts, axis=-1)
    # a token with fewer different experts than the others makes dispatchers hang
    if (ascending[..., 1:] == ascending[..., :-1]).any():
        raise ValueError("a token is routed to one expert twice")
    return experts


def _decode_turn(entry: Sequence[Any]) -> Turn:
    # older files have calls of tools alone, with two values, or turns without metrics
    missing: list[Any] = [0.0, 0.0, True, {}][len(entry) - 2 :]
    end, entropy, reward, seconds, is_call, metrics = [*entry, *missing]
    return Turn(
        end=int(end),
        entropy=_or_nan(entropy),
        reward=float(reward),
        seconds=float(seconds),
        is_call=bool(is_call),
        metrics=tuple((name, float(value)) for name, value in metrics.items()),
    )


def _decode_branch(pair: Sequence[int] | None) -> Branch | None:
    if pair is None:
        return None
    parent, num_tokens = pair
    if not isinstance(parent, int) or not isinstance(num_tokens, int):
        raise TypeError(f"a branch is at {num_tokens!r} tokens of response {parent!r}")
    return Branch(parent, num_tokens)


def _check_branches(responses: Sequence[Response]) -> None:
    """Raise ValueError if a response branches outside of an earlier response."""
    for index, response in enumerate(responses):
        if (branch := response.branch) is None:
            continue
        within = 0 <= branch.parent < index and 0 <= branch.num_tokens <= min(
            len(response.token_ids), len(responses[branch.parent].token_ids)
        )
        if not within:
            raise ValueError(f"response {index} cannot have the branch {branch}")


def _check_types(entry: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} is a {type(entry[name]).__name__}")


def _pack(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _unpack(values: str | Sequence[float | None], kind: str) -> np.ndarray:
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values, validate=True), dtype=kind)
    return np.array([math.nan if value is None else value for value in values], dtype=kind)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
