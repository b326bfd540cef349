"""A sampler's state: the groups that wait for a later step, finished and open ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from megadapo.data.group import (
    Group,
    Response,
    decode_group,
    decode_response,
    encode_group,
    encode_response,
)
from megadapo.rollout.sampling.statistics import SampledBatch


class OpenEntry(NamedTuple):
    """An open group."""

    version: int
    """Policy version of the engines when it was requested."""
    responses: tuple[Response, ...]
    """The responses that the engines have of it: those at the latest pause, or none."""


@dataclass
class Reserve:
    """Requested groups that no step has trained on, by prompt index."""

    finished: dict[int, Group] = field(default_factory=dict)
    """Finished mixed groups."""
    versions: dict[int, int] = field(default_factory=dict)
    """Policy version of the engines when each finished group was requested."""
    open: dict[int, OpenEntry] = field(default_factory=dict)

    def finish(self, group: Group, *, is_mixed: bool) -> None:
        """Remove an open group, and keep it as a finished one if it is mixed."""
        version = self.open.pop(group.prompt_index).version
        if is_mixed:
            self.finished[group.prompt_index] = group
            self.versions[group.prompt_index] = version

    def park(self, prompt_index: int, responses: tuple[Response, ...]) -> None:
        """Keep the tokens of an open group that the engines have stopped."""
        version = self.open[prompt_index].version
        has_tokens = any(len(response.token_ids) for response in responses)
        self.open[prompt_index] = OpenEntry(version, responses if has_tokens else ())

    def counts(self, num_responses: int) -> dict[int, tuple[int, ...]]:
        """Return the number of tokens of each response of each open group."""
        none = (0,) * num_responses
        return {
            index: tuple(len(response.token_ids) for response in responses) or none
            for index, (_, responses) in self.open.items()
        }

    def take(self, prompt_index: int) -> Group:
        """Remove and return a finished group."""
        del self.versions[prompt_index]
        return self.finished.pop(prompt_index)

    def copy(self) -> Reserve:
        return Reserve(dict(self.finished), dict(self.versions), dict(self.open))

    def to_json(self) -> dict[str, Any]:
        """Return all groups as JSON values; their numbers stay exact."""
        return {
            "finished": [
                {"version": self.versions[index], "group": encode_group(group)}
                for index, group in sorted(self.finished.items())
            ],
            "open": [
                {
                    "prompt_index": index,
                    "version": version,
                    "responses": [encode_response(response) for response in responses],
                }
                for index, (version, responses) in sorted(self.open.items())
            ],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Return the groups that `to_json` wrote."""
        reserve = cls()
        for entry in state["finished"]:
            group = decode_group(entry["group"])
            reserve.finished[group.prompt_index] = group
            reserve.versions[group.prompt_index] = int(entry["version"])
        for entry in state["open"]:
            responses = tuple(decode_response(response) for response in entry["responses"])
            reserve.open[int(entry["prompt_index"])] = OpenEntry(int(entry["version"]), responses)
        return reserve


@dataclass(frozen=True)
class SamplerState:
    """A sampler's state. Most states are never written, so groups are encoded only on writing."""

    plain: Mapping[str, Any]
    reserve: Reserve
    batch: SampledBatch | None
    """The batch that is not taken; None: it begins again."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values; its numbers stay exact."""
        batch = None if self.batch is None else self.batch.to_json()
        return {**self.plain, "reserve": self.reserve.to_json(), "counters": batch}
