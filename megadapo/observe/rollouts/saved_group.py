"""A saved group, and its JSON line in `RUN/rollouts/step-N.jsonl.zst`:

    {"step": int,
     "disposition": "trained" | "to_reserve" | "dropped" | "all_correct" | "all_wrong" |
                    "out_of_band" | "equal" | "held_out",
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
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from megadapo.data.group import Failure, Group, Response, Score, Turn, decode_floats, encode_floats
from megadapo.data.prompts import Prompt

Disposition = Literal[
    "trained",
    "to_reserve",
    "dropped",
    "all_correct",
    "all_wrong",
    "out_of_band",
    "equal",
    "held_out",
]
"""The use of a group: trained on in this step, kept for the next one, dropped because the reserve
was full, or rejected because the share of correct responses is 1, 0, or outside of
sampling.accuracy_range. If no function says what is correct, equal rewards are rejected. Groups of
an evaluation are held out."""


Floats = Annotated[np.ndarray | None, PlainValidator(decode_floats), PlainSerializer(encode_floats)]


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("text", "answer"), str),
    **dict.fromkeys(("reward", "penalty", "shaped_reward"), int | float),
    **dict.fromkeys(("correct", "symbolic_correct", "rule_correct"), bool | None),
    "advantage": int | float | None,
}
_WRITTEN = {*_KINDS, "branch", "entropy", "experts", "reward_parts", "steps", "turns", "advantages"}
"""Values that a saved response always has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedResponse:
    """One response of n tokens with its score and the results of training."""

    response: Response
    score: Score
    tokens: tuple[str, ...]
    """[n] text that each token added; "" for special tokens and incomplete characters."""
    logprobs_old: Floats
    """[n] float32 denominator of the ratio; NaN if a token has no loss.

    The trainer's log-probs before the step's first update, or the engine's for stale tokens that
    keep it."""
    logprobs_update: Floats
    """[n] float32 trainer log-probs in the update that trained the response."""
    penalty: float
    """Overlong punishment, at most 0."""
    shaped_reward: float
    """reward + penalty, without a KL term in the reward."""
    advantage: float | None
    """Advantage of the response; the mean over its tokens if they differ."""
    advantages: Floats = None
    """[n] float32 advantages of the tokens, if they differ."""
    rule_correct: bool | None
    """Verdict of the string rule, whichever of the two scorers decided; None if no function says
    what is correct."""

    @model_serializer(mode="wrap")
    def _flat(self, fields_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entry = fields_of(self)
        return {**entry.pop("response"), **entry.pop("score"), **entry}

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse values that its user may have changed, and that a default would replace."""
        if missing := sorted(_WRITTEN - entry.keys()):
            raise ValueError(f"without {', '.join(missing)}")
        for name, kind in _KINDS.items():
            if not isinstance(entry[name], kind):
                raise ValueError(f"{name} is a {type(entry[name]).__name__}")
        return {**entry, "response": entry, "score": entry}

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
    disposition: Disposition
    from_reserve: bool
    """Whether an earlier step generated the group."""
    prompt_index: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    responses: tuple[SavedResponse, ...]
    failures: tuple[Failure, ...] = ()
    """Failures of reward functions and environments on responses that were left out."""
    control_tokens: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens in the responses by their ids."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError if lists of a response, which its user may have changed, do not fit."""
        sizes = [len(saved.response.token_ids) for saved in self.responses]
        for index, (saved, size) in enumerate(zip(self.responses, sizes, strict=True)):
            response = saved.response
            trained = (saved.logprobs_old, saved.logprobs_update, saved.advantages)
            listed = (response.logprobs, saved.tokens, *trained)
            lengths = {len(one) for one in listed if one is not None}
            if lengths != {size}:
                raise ValueError(f"lists of a response of {size} tokens have lengths {lengths}")
            ends = [0, *(end for end, _ in saved.score.steps), size]
            if ends != sorted(ends):
                raise ValueError(f"steps end at {ends[1:-1]} in a response of {size} tokens")
            if (branch := response.branch) is not None and not (
                0 <= branch.parent < index
                and 0 <= branch.num_tokens <= min(size, sizes[branch.parent])
            ):
                raise ValueError(f"response {index} cannot have the branch {branch}")
            if response.experts is not None:
                ascending = np.sort(response.experts, axis=-1)
                # a token with fewer different experts than the others makes dispatchers hang
                if (ascending[..., 1:] == ascending[..., :-1]).any():
                    raise ValueError("a token is routed to one expert twice")
        return self

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
