"""What waits for the next step and is saved: surplus groups, and groups that are unfinished."""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadapo.algorithm.groups import Branch
from megadapo.data.batch import Group, Sample
from megadapo.data.policy_versions import NO_VERSION, decode_versions, encode_versions
from megadapo.data.prompts import Prompt
from megadapo.data.routed_experts import decode_experts, encode_experts
from megadapo.errors import CheckpointError
from megadapo.rollout.types import Response, ToolCall


class Reserve:
    """A bounded queue: what was asked for first is used first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: deque[Group] = deque()
        self._encoded: dict[int, tuple[Group, dict[str, Any]]] = {}
        """What `state_dict` has made of the groups, by their identity: most stay for many steps."""

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, num_groups: int, *, oldest_version: int) -> tuple[list[Group], list[Group]]:
        """Take up to so many groups, the first-asked ones, and all that are too old to be used.

        Args:
            oldest_version: policy version that every token of a usable group has at least.

        Returns:
            The groups to be used, and those that have grown too old.
        """
        expired = [group for group in self._groups if group.oldest_version < oldest_version]
        usable = [group for group in self._groups if group.oldest_version >= oldest_version]
        self._groups = deque(usable[num_groups:])
        return usable[:num_groups], expired

    def put(self, groups: Sequence[Group]) -> int:
        """Keep as many of the groups as there is room for and return their number."""
        kept = groups[: max(0, self._limit - len(self._groups))]
        self._groups = deque(sorted([*self._groups, *kept], key=lambda group: group.order))
        return len(kept)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all groups, as JSON can hold them; each is encoded once."""
        known, self._encoded = self._encoded, {}
        for group in self._groups:
            # the group is held too, so that no other one takes its identity
            entry = known.get(id(group)) or (group, encode_group(group))
            self._encoded[id(group)] = entry
        return [entry for _, entry in self._encoded.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the contents; a limit that is smaller now keeps the oldest.

        Raises:
            CheckpointError: the state is damaged.
        """
        try:
            groups = [decode_group(entry) for entry in state]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved reserve of groups is damaged: {error!r}") from error
        self._groups = deque(groups[: self._limit])


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A group that was stopped and goes on in the next step."""

    order: int
    responses: tuple[Response, ...]
    """What there is of each; finished ones among them."""

    @property
    def oldest_version(self) -> float:
        """The earliest policy version among its tokens; infinite where it has none."""
        versions = [r.policy_versions[r.policy_versions != NO_VERSION] for r in self.responses]
        return min((int(found.min()) for found in versions if len(found)), default=math.inf)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; its numbers stay exact."""
        return {"order": self.order, "responses": [_encode_response(r) for r in self.responses]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Unfinished:
        """Return what `to_json` was given."""
        responses = tuple(_decode_response(response) for response in entry["responses"])
        return cls(order=int(entry["order"]), responses=responses)


def encode_group(group: Group) -> dict[str, Any]:
    """Return a group as JSON values; its numbers stay exact."""
    return {
        "order": group.order,
        "prompt": group.prompt.to_json(),
        "prompt_ids": _pack(group.samples[0].prompt_ids, "<i4"),
        "samples": [_encode_sample(sample) for sample in group.samples],
        "rewards": list(group.rewards),
        "correct": list(group.correct),
        "answers": list(group.answers),
        "symbolic_correct": list(group.symbolic_correct),
        "reward_parts": [dict(parts) for parts in group.reward_parts],
        "steps": [list(steps) for steps in group.steps],
    }


def decode_group(entry: Mapping[str, Any]) -> Group:
    """Return the group that `encode_group` was given.

    The verifier's answers, parts and steps may be missing, as a run can go on from a state without
    them.
    """
    size = len(entry["samples"])
    prompt_ids = tuple(_unpack(entry["prompt_ids"], "<i4").tolist())
    return Group(
        order=entry["order"],
        prompt=Prompt.from_json(entry["prompt"]),
        samples=tuple(_decode_sample(sample, prompt_ids) for sample in entry["samples"]),
        rewards=tuple(entry["rewards"]),
        correct=tuple(entry["correct"]),
        answers=tuple(entry.get("answers", [""] * size)),
        symbolic_correct=tuple(entry.get("symbolic_correct", [None] * size)),
        reward_parts=tuple(tuple(parts.items()) for parts in entry.get("reward_parts", ())),
        steps=tuple(
            tuple((int(end), float(score)) for end, score in steps)
            for steps in entry.get("steps", ())
        ),
    )


def _encode_sample(sample: Sample) -> dict[str, Any]:
    return {
        "response_ids": _pack(sample.response_ids, "<i4"),
        "logprobs": _pack(sample.logprobs_rollout, "<f4"),
        "finish_reason": sample.finish_reason,
        "policy_versions": encode_versions(sample.policy_versions),
        "text": sample.text,
        "branch": sample.branch,
        "experts": encode_experts(sample.experts),
    }


def _decode_sample(entry: Mapping[str, Any], prompt_ids: tuple[int, ...]) -> Sample:
    response_ids = _unpack(entry["response_ids"], "<i4")
    # a state of a run that knew one version a response has `policy_version`
    versions = entry["policy_versions"] if "policy_versions" in entry else entry["policy_version"]
    return Sample(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs_rollout=_unpack(entry["logprobs"], "<f4"),
        finish_reason=entry["finish_reason"],
        policy_versions=decode_versions(versions, len(response_ids)),
        text=entry["text"],
        # one of a run that knew no branches, or no experts, has none
        branch=None if entry.get("branch") is None else Branch(*entry["branch"]),
        experts=decode_experts(entry.get("experts")),
    )


def _encode_response(response: Response) -> dict[str, Any]:
    return {
        "response_ids": _pack(response.token_ids, "<i4"),
        "logprobs": _pack(response.logprobs, "<f4"),
        "finish_reason": response.finish_reason,
        "policy_versions": encode_versions(response.policy_versions),
        "text": response.text,
        "calls": [call.end for call in response.calls],
        "experts": encode_experts(response.experts),
    }


def _decode_response(entry: Mapping[str, Any]) -> Response:
    token_ids = _unpack(entry["response_ids"], "<i4")
    return Response(
        token_ids=token_ids,
        logprobs=_unpack(entry["logprobs"], "<f4"),
        finish_reason=entry["finish_reason"],
        policy_versions=decode_versions(entry["policy_versions"], len(token_ids)),
        text=entry["text"],
        # responses that can be stopped do not branch: their entropies are not measured
        calls=tuple(ToolCall(end=end) for end in entry.get("calls", ())),
        experts=decode_experts(entry.get("experts")),
    )


def _pack(values: np.ndarray | Sequence[int], kind: str) -> str:
    """Numbers as base64: exact, NaN included, and a quarter of their size as decimal text."""
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()


def _unpack(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
