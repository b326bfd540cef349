"""A sampler's state: the groups that wait for a later step, finished and open ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from megadapo.data.group import Group, Response
from megadapo.rollout.sampling.statistics import GroupStats, Level, SampledBatch
from megadapo.rollout.sampling.window import KeepRate


@dataclass(frozen=True)
class OpenEntry:
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
            index: tuple(len(response.token_ids) for response in entry.responses) or none
            for index, entry in self.open.items()
        }

    def take(self, prompt_index: int) -> Group:
        """Remove and return a finished group."""
        del self.versions[prompt_index]
        return self.finished.pop(prompt_index)

    def copy(self) -> Reserve:
        return Reserve(dict(self.finished), dict(self.versions), dict(self.open))


@dataclass
class PromptHistory:
    """The latest result of every prompt, and the keep rate of each level.

    The end of a step adds the results that its statistics count. So requests depend on seed and
    weights alone, unless the mode follows the engines' speed.
    """

    prompts: dict[str, Level] = field(default_factory=dict)
    rates: dict[Level, KeepRate] = field(default_factory=dict)

    def keep_rate(self, prompt_id: str) -> KeepRate:
        """Return the keep rate of prompts at the level of this one."""
        return self.rates.setdefault(self._level(prompt_id), KeepRate())

    def end_step(self, stats: Sequence[GroupStats]) -> None:
        """Add the groups of a step."""
        mixed: dict[Level, list[bool]] = {level: [] for level in get_args(Level)}
        for group in stats:
            mixed[self._level(group.prompt_id)].append(group.is_mixed)
        for level, flags in mixed.items():
            self.rates.setdefault(level, KeepRate()).end_step(len(flags), sum(flags))
        self.prompts |= {group.prompt_id: group.level for group in stats}

    def copy(self) -> PromptHistory:
        """Return a copy that later steps do not change."""
        rates = {level: replace(rate) for level, rate in self.rates.items()}
        return PromptHistory(dict(self.prompts), rates)

    def _level(self, prompt_id: str) -> Level:
        return self.prompts.get(prompt_id, "unseen")


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """A sampler's state. Most states are never written, so groups are encoded only on writing."""

    cursor: Mapping[str, Any]
    """The next prompt index, and what identifies the prompts."""
    difficulty: PromptHistory
    schedule: int | None
    """Number of records of the schedule that are done; None: they were made with other prompts."""
    most_untrained: int
    """Largest number of groups that are open or wait for a batch, in async mode."""
    reserve: Reserve
    counters: SampledBatch | None
    """The batch that is not taken; None: it begins again."""
