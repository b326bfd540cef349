"""One saved group: what it holds, and the JSON line it is in `RUN/rollouts/step-N.jsonl.zst`:

    {"step": int, "order": int, "from_reserve": bool,
     "fate": "trained" | "to_reserve" | "dropped" | "all_correct" | "all_wrong" | "out_of_band",
     "prompt": {"id": str, "messages": [[role, content], ...], "ground_truth": str,
                "data_source": str},
     "prompt_ids": [int, ...],
     "responses": [{"text": str, "token_ids": [int, ...], "tokens": [str, ...],
                    "logprobs_rollout": [float | null, ...],
                    "logprobs_old": [float | null, ...] | null,
                    "logprobs_update": [float | null, ...] | null,
                    "finish_reason": "stop" | "length",
                    "policy_versions": [[int, int], ...],
                    "reward": float, "penalty": float, "shaped_reward": float,
                    "advantage": float | null, "correct": bool, "answer": str,
                    "rule_correct": bool, "symbolic_correct": bool | null,
                    "advantages": [float | null, ...] | null,
                    "reward_parts": {str: float}, "steps": [[int, float], ...],
                    "branch": [int, int] | null,
                    "experts": {"shape": [int, int, int], "dtype": str, "data": str} | null},
                   ...]}

A tool's output is among the tokens, with policy version -1 and null log-probs.

Log-probs are float32 in the fewest digits that give the same float32 back, and null where there is
no finite one: neither the engine's nor the trainer's reason for that matters, such a token is not
trained on. Policy versions are runs of tokens, [version, number of tokens]; older files have one
`"policy_version": int` for the whole response, and no advantages, reward_parts, steps, branch or
experts.
What only training gives (advantage, advantages, logprobs_old, logprobs_update) is null in groups
that were not trained on; where no trainer was there, "trained" are those that it would have been
given, with an advantage and null log-probs. "advantages" is null where "advantage" is that of each
token. A step is the number of tokens up to its end, and its score. The meaning of each
field is said at `SavedGroup` and `SavedResponse`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from megadapo.algorithm.groups import Branch, Steps
from megadapo.data.batch import Group, Sample
from megadapo.data.policy_versions import decode_versions, encode_versions
from megadapo.data.prompts import Prompt
from megadapo.data.routed_experts import decode_experts, encode_experts

Item = TypeVar("Item")
Disposition = Literal["trained", "to_reserve", "dropped", "all_correct", "all_wrong", "out_of_band"]
"""What became of a group: trained on in this step, kept for the next one, thrown away for want of
room in the reserve, or without a signal because all its responses are right, or wrong, or a share
of them outside sampling.min_accuracy to sampling.max_accuracy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedResponse:
    """One response with n tokens and all that was said about it."""

    text: str
    token_ids: np.ndarray  # [n] int32
    tokens: tuple[str, ...]
    """[n] what each token added to the text; a special token or a part of a character adds ""."""
    logprobs_rollout: np.ndarray  # [n] float32, NaN where the engine gave no finite one
    logprobs_old: np.ndarray | None
    """[n] float32: what the ratio is taken against, the trainer's before the step's first update
    (or the engine's, for stale tokens that keep it); NaN where a token has no loss."""
    logprobs_update: np.ndarray | None
    """[n] float32: the trainer's in the update that the response was trained in."""
    finish_reason: Literal["stop", "length"]
    policy_versions: np.ndarray  # [n] int32: the weight publication that sampled each token, or
    # NO_VERSION where a tool put it out
    reward: float
    """The verifier's, before any shaping."""
    penalty: float
    """Overlong punishment, not positive."""
    shaped_reward: float
    """reward + penalty: what the advantage is made of, less a KL divergence if that is in it."""
    advantage: float | None
    """Mean over its tokens where these have advantages of their own."""
    advantages: np.ndarray | None = None
    """[n] float32 of each token, where these have advantages of their own."""
    correct: bool
    answer: str
    """As the verifier read it."""
    rule_correct: bool
    """Verdict of the string rule, whichever of the two decided."""
    symbolic_correct: bool | None
    """Verdict of the symbolic comparison; None where it gave none, or not in time."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, where more than the rule scores."""
    steps: Steps = ()
    """The scored steps, each with its share of the reward, where there are any."""
    branch: Branch | None = None
    """Where it left another response of its group; None where it began at the prompt."""
    experts: np.ndarray | None = None  # [m, layers, K] as in data/routed_experts.py
    """Of prompt and response, where the engine handed them over."""

    @property
    def disagreed(self) -> bool:
        """Whether the string rule and the symbolic comparison differ."""
        return self.symbolic_correct is not None and self.symbolic_correct != self.rule_correct

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedGroup:
    """One prompt with its responses, and what became of them."""

    step: int
    """The step that generated it, or that trained on it where `from_reserve`."""
    order: int
    """Position in which the group was asked for, increasing over the run."""
    fate: Disposition
    from_reserve: bool
    """Whether an earlier step had generated it."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    responses: tuple[SavedResponse, ...]

    @property
    def group(self) -> Group:
        """The group as sampling made it."""
        return Group(
            order=self.order,
            prompt=self.prompt,
            samples=tuple(_sample(response, self.prompt_ids) for response in self.responses),
            rewards=tuple(response.reward for response in self.responses),
            correct=tuple(response.correct for response in self.responses),
            answers=tuple(response.answer for response in self.responses),
            symbolic_correct=tuple(response.symbolic_correct for response in self.responses),
            reward_parts=_or_nothing(tuple(r.reward_parts.items()) for r in self.responses),
            steps=_or_nothing(response.steps for response in self.responses),
        )


def encode_saved(saved: SavedGroup) -> dict[str, Any]:
    """Return a group as the JSON values of its line."""
    return {
        "step": saved.step,
        "order": saved.order,
        "fate": saved.fate,
        "from_reserve": saved.from_reserve,
        "prompt": saved.prompt.to_json(),
        "prompt_ids": list(saved.prompt_ids),
        "responses": _encode_responses(saved.responses),
    }


def decode_saved(entry: Mapping[str, Any]) -> SavedGroup:
    """Return the group that `encode_saved` was given.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    if entry["fate"] not in get_args(Disposition):
        raise ValueError(f"unknown fate {entry['fate']!r}")
    responses = tuple(_decode_response(response) for response in entry["responses"])
    _check_branches(responses)
    return SavedGroup(
        step=entry["step"],
        order=entry["order"],
        fate=entry["fate"],
        from_reserve=entry["from_reserve"],
        prompt=Prompt.from_json(entry["prompt"]),
        prompt_ids=tuple(entry["prompt_ids"]),
        responses=responses,
    )


_ARRAYS = (
    *("token_ids", "tokens", "logprobs_rollout", "logprobs_old", "logprobs_update", "advantages"),
)
_TYPES = {
    "text": str,
    "finish_reason": str,
    "reward": int | float,
    "penalty": int | float,
    "shaped_reward": int | float,
    "advantage": int | float | None,
    "correct": bool,
    "answer": str,
    "rule_correct": bool,
    "symbolic_correct": bool | None,
}


_FLOATS = ("logprobs_rollout", "logprobs_old", "logprobs_update", "advantages")


def _encode_responses(responses: Sequence[SavedResponse]) -> list[dict[str, Any]]:
    floats = _encode_floats([getattr(r, name) for r in responses for name in _FLOATS])
    return [
        vars(response)
        | {
            "token_ids": response.token_ids.tolist(),
            "policy_versions": encode_versions(response.policy_versions),
            "tokens": list(response.tokens),
            **{name: next(floats) for name in _FLOATS},
            "reward_parts": dict(response.reward_parts),
            "experts": encode_experts(response.experts),
        }
        for response in responses
    ]


def _decode_response(entry: Mapping[str, Any]) -> SavedResponse:
    entry = dict(entry)
    if "policy_version" in entry:  # written where a response had one version
        entry["policy_versions"] = entry.pop("policy_version")
    # left out where the rule was known to be what decides
    entry.setdefault("rule_correct", entry["correct"])
    nothing = dict.fromkeys(("advantages", "branch", "experts"))
    entry = {**nothing, "reward_parts": {}, "steps": [], **entry}
    for name, kind in _TYPES.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} is a {type(entry[name]).__name__}")
    lengths = {len(entry[name]) for name in _ARRAYS if entry[name] is not None}
    if len(lengths) != 1:
        raise ValueError(f"lists of a response have different lengths: {sorted(lengths)}")
    arrays = {
        "token_ids": np.array(entry["token_ids"], dtype=np.int32),
        "policy_versions": decode_versions(entry["policy_versions"], len(entry["token_ids"])),
        "tokens": tuple(map(_text, entry["tokens"])),
        "logprobs_rollout": _decode_floats(entry["logprobs_rollout"]),
        "logprobs_old": _decode_floats(entry["logprobs_old"]),
        "logprobs_update": _decode_floats(entry["logprobs_update"]),
        "advantages": _decode_floats(entry["advantages"]),
        "branch": None if entry["branch"] is None else _branch(*entry["branch"]),
        "reward_parts": {name: float(value) for name, value in entry["reward_parts"].items()},
        "steps": decode_steps(entry["steps"], len(entry["token_ids"])),
        "experts": decode_experts(entry["experts"]),
    }
    return SavedResponse(**{**entry, **arrays})


def decode_steps(entry: Sequence[Sequence[float]], num_tokens: int) -> Steps:
    """Steps from the lists that JSON made of them.

    Raises:
        TypeError, ValueError: they are no steps of a response of so many tokens.
    """
    steps = tuple((int(end), float(score)) for end, score in entry)
    ends = [0, *(end for end, _ in steps), num_tokens]
    if ends != sorted(ends):
        raise ValueError(f"steps end at {ends[1:-1]} in a response of {num_tokens} tokens")
    return steps


def _or_nothing(of_each: Iterable[Item]) -> tuple[Item, ...]:
    """One entry a response, or none at all where all are empty."""
    entries = tuple(of_each)
    return entries if any(entries) else ()


def _branch(parent: int, num_tokens: int) -> Branch:
    if not isinstance(parent, int) or not isinstance(num_tokens, int):
        raise TypeError(f"a branch is at {num_tokens!r} tokens of response {parent!r}")
    return Branch(parent, num_tokens)


def _check_branches(responses: Sequence[SavedResponse]) -> None:
    """A response can only branch off one before it, within the tokens of both."""
    for place, response in enumerate(responses):
        if (branch := response.branch) is None:
            continue
        within = 0 <= branch.parent < place and 0 <= branch.num_tokens <= min(
            len(response.token_ids), len(responses[branch.parent].token_ids)
        )
        if not within:
            raise ValueError(f"response {place} cannot begin as {branch} says")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a token is a {type(value).__name__}")
    return value


def _encode_floats(
    arrays: Sequence[np.ndarray | None],
) -> Iterator[list[float | None] | None]:
    """Yield each array's numbers; None is in the place of one that is not finite."""
    import pyarrow

    nothing = np.empty(0, dtype=np.float32)
    flat = np.concatenate([nothing, *(array for array in arrays if array is not None)])
    column = pyarrow.array(flat.astype(np.float32), mask=~np.isfinite(flat))
    # Arrow's text of a float32 is the shortest that gives it back, a Python float's is not; all at
    # once, since what a call costs is what a hundred numbers do
    texts = column.cast(pyarrow.string()).to_pylist()
    numbers = [None if text is None else float(text) for text in texts]
    start = 0
    for array in arrays:
        stop = start + (0 if array is None else len(array))
        yield None if array is None else numbers[start:stop]
        start = stop


def _decode_floats(values: Sequence[float | None] | None) -> np.ndarray | None:
    if values is None:
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)


def _sample(response: SavedResponse, prompt_ids: tuple[int, ...]) -> Sample:
    return Sample(
        prompt_ids=prompt_ids,
        response_ids=response.token_ids,
        logprobs_rollout=response.logprobs_rollout,
        finish_reason=response.finish_reason,
        policy_versions=response.policy_versions,
        text=response.text,
        branch=response.branch,
        experts=response.experts,
    )
