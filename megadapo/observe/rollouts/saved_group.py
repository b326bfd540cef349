"""A saved group, and its JSON line in `RUN/rollouts/step-N.jsonl.zst`:

    {"step": int,
     "disposition": "trained" | "to_reserve" | "dropped" | "all_correct" | "all_wrong" |
                    "out_of_band" | "equal",
     "from_reserve": bool, "prompt_index": int,
     "prompt": {"id": str, "messages": [[role, content], ...], "ground_truth": str,
                "data_source": str},
     "prompt_ids": [int, ...],
     "responses": [{"text": str, "token_ids": [int, ...], "tokens": [str, ...],
                    "logprobs_rollout": [float | null, ...],
                    "logprobs_old": [float | null, ...] | null,
                    "logprobs_update": [float | null, ...] | null,
                    "finish_reason": "stop" | "max_turns" | "length",
                    "policy_versions": [[int, int], ...],
                    "turns": [[int, float | null, float, float, bool, {str: float}],
                              ...],
                    "entropy": float | null,
                    "reward": float, "penalty": float, "shaped_reward": float,
                    "advantage": float | null, "advantages": [float | null, ...] | null,
                    "correct": bool | null, "answer": str,
                    "rule_correct": bool | null, "symbolic_correct": bool | null,
                    "reward_parts": {str: float}, "reward_texts": {str: str},
                    "steps": [[int, float], ...],
                    "branch": [int, int] | null,
                    "experts": {"shape": [int, int, int], "dtype": str, "data": str} | null,
                    "failure": null}, ...],
     "failures": [[str, str], ...], "control_tokens": {str: str}}

Output of tools and environments is part of the tokens, with policy version -1 and null log-probs.
Log-probs are float32 in the fewest digits that restore them, and null if not finite; such a token
is not trained on. Policy versions are runs of tokens, [version, number of tokens].

"advantage", "advantages", "logprobs_old" and "logprobs_update" are null in groups that were not
trained on. Without a trainer, "trained" groups are the ones it would receive; they have an
advantage and null log-probs. "advantages" is null if every token has "advantage". A step is its
end, counted in tokens, and its score. A turn is its end, with its output, the entropy after it,
its reward, its environment's seconds, whether the output answers a call, and what the environment
counted. `SavedResponse`,
`Response` and `Score` describe the fields. "control_tokens" has the names of the special tokens in
the responses by their ids. "reward_texts" is left out if it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from megadapo.data.group import (
    Failure,
    Group,
    Response,
    Score,
    Turn,
    decode_floats,
    decode_group,
    encode_floats,
    encode_response,
    encode_score,
)
from megadapo.data.prompts import Prompt

Disposition = Literal[
    "trained", "to_reserve", "dropped", "all_correct", "all_wrong", "out_of_band", "equal"
]
"""The use of a group: trained on in this step, kept for the next one, dropped because the reserve
was full, or rejected because the share of correct responses is 1, 0, or outside of
sampling.accuracy_range. If no function says what is correct, equal rewards are rejected."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedResponse:
    """One response of n tokens with its score and the results of training."""

    response: Response
    score: Score
    tokens: tuple[str, ...]
    """[n] text that each token added; "" for special tokens and incomplete characters."""
    logprobs_old: np.ndarray | None
    """[n] float32 denominator of the ratio; NaN if a token has no loss.

    The trainer's log-probs before the step's first update, or the engine's for stale tokens that
    keep it."""
    logprobs_update: np.ndarray | None
    """[n] float32 trainer log-probs in the update that trained the response."""
    penalty: float
    """Overlong punishment, at most 0."""
    shaped_reward: float
    """reward + penalty, without a KL term in the reward."""
    advantage: float | None
    """Advantage of the response; the mean over its tokens if they differ."""
    advantages: np.ndarray | None = None
    """[n] float32 advantages of the tokens, if they differ."""
    rule_correct: bool | None
    """Verdict of the string rule, whichever of the two scorers decided; None if no function says
    what is correct."""

    @property
    def disagreed(self) -> bool:
        """Whether the string rule and the symbolic comparison differ."""
        symbolic = self.score.symbolic_correct
        return symbolic is not None and symbolic != self.rule_correct


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedGroup:
    """One prompt with its responses, and the group's disposition."""

    step: int
    """Step that generated the group, or trained on it if it is from the reserve."""
    prompt_index: int
    disposition: Disposition
    from_reserve: bool
    """Whether an earlier step generated the group."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    responses: tuple[SavedResponse, ...]
    failures: tuple[Failure, ...] = ()
    """Failures of reward functions and environments on responses that were left out."""
    control_tokens: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens in the responses by their ids."""

    @property
    def group(self) -> Group:
        """The group as it was sampled."""
        return Group(
            prompt_index=self.prompt_index,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            responses=tuple(saved.response for saved in self.responses),
            scores=tuple(saved.score for saved in self.responses),
            failures=self.failures,
        )


def encode_saved(saved: SavedGroup) -> dict[str, Any]:
    """Return a group as the JSON values of its line."""
    return {
        "step": saved.step,
        "disposition": saved.disposition,
        "from_reserve": saved.from_reserve,
        "prompt_index": saved.prompt_index,
        "prompt": saved.prompt.to_json(),
        "prompt_ids": list(saved.prompt_ids),
        "responses": [encode_saved_response(response) for response in saved.responses],
        "failures": [list(failure) for failure in saved.failures],
        "control_tokens": {str(number): name for number, name in saved.control_tokens.items()},
    }


def encode_saved_response(saved: SavedResponse) -> dict[str, Any]:
    """Return a response as JSON values."""
    return {
        **encode_response(saved.response, readable=True),
        **encode_score(saved.score),
        "tokens": list(saved.tokens),
        "logprobs_old": encode_floats(saved.logprobs_old),
        "logprobs_update": encode_floats(saved.logprobs_update),
        "penalty": saved.penalty,
        "shaped_reward": saved.shaped_reward,
        "advantage": saved.advantage,
        "advantages": encode_floats(saved.advantages),
        "rule_correct": saved.rule_correct,
    }


def decode_saved(entry: Mapping[str, Any]) -> SavedGroup:
    """Return the group that `encode_saved` wrote.

    Raises:
        KeyError, TypeError, ValueError: the entry is not a saved group.
    """
    if entry["disposition"] not in get_args(Disposition):
        raise ValueError(f"unknown disposition {entry['disposition']!r}")
    group = decode_group(entry)
    return SavedGroup(
        step=entry["step"],
        prompt_index=group.prompt_index,
        disposition=entry["disposition"],
        from_reserve=entry["from_reserve"],
        prompt=group.prompt,
        prompt_ids=group.prompt_ids,
        responses=tuple(
            _decode_saved_response(one, response, score)
            for one, response, score in zip(
                entry["responses"], group.responses, group.scores, strict=True
            )
        ),
        failures=group.failures,
        # files of earlier versions have none
        control_tokens={
            int(number): str(name) for number, name in entry.get("control_tokens", {}).items()
        },
    )


_KINDS = {
    "penalty": int | float,
    "shaped_reward": int | float,
    "advantage": int | float | None,
    "rule_correct": bool | None,
}
_ARRAYS = ("token_ids", "tokens", "logprobs_old", "logprobs_update", "advantages")


def _decode_saved_response(
    entry: Mapping[str, Any], response: Response, score: Score
) -> SavedResponse:
    for name, kind in _KINDS.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} is a {type(entry[name]).__name__}")
    lengths = {len(entry[name]) for name in _ARRAYS if entry[name] is not None}
    if len(lengths) != 1:
        raise ValueError(f"lists of a response have different lengths: {sorted(lengths)}")
    if not all(isinstance(token, str) for token in entry["tokens"]):
        raise TypeError("tokens are not all strings")
    return SavedResponse(
        response=response,
        score=score,
        tokens=tuple(entry["tokens"]),
        logprobs_old=decode_floats(entry["logprobs_old"]),
        logprobs_update=decode_floats(entry["logprobs_update"]),
        advantages=decode_floats(entry["advantages"]),
        **{name: entry[name] for name in _KINDS},
    )


_RETURN = "/return"


@dataclass(frozen=True)
class Part:
    """Successive tokens of a response by one author."""

    start: int
    end: int
    turn: Turn | None
    """Turn whose answer these are; None if the policy sampled them."""


def conversation(response: Response) -> Iterator[Part]:
    """Yield the parts of a response in order; an answer may have no tokens, an action has some."""
    sampled, start = response.is_sampled, 0
    for turn in response.turns:
        answer = start + int(sampled[start : turn.end].sum())
        if start < answer:
            yield Part(start, answer, None)
        yield Part(answer, turn.end, turn)
        start = turn.end
    if start < len(sampled):
        yield Part(start, len(sampled), None)


def environment_of(saved: SavedResponse) -> str | None:
    """Return the name of the environment that a response was played in; None without one."""
    for name, _ in saved.score.parts:
        if name.startswith("environment/") and name.endswith(_RETURN):
            return name.removeprefix("environment/").removesuffix(_RETURN)
    return None
