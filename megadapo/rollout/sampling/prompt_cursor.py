"""The next prompt to request, and the latest result of each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.rollout.sampling.keep_rate import KeepRate
from megadapo.rollout.sampling.statistics import GroupStats

Level = Literal["unseen", "all_wrong", "mixed", "all_correct"]
LEVELS: tuple[Level, ...] = ("unseen", "all_wrong", "mixed", "all_correct")


class PromptHistory:
    """The latest result of every prompt, and the keep rate of each level.

    The end of a step adds the results that its statistics count. So requests depend on seed and
    weights alone, unless the mode follows the engines' speed.
    """

    def __init__(self) -> None:
        self._levels: dict[str, Level] = {}
        self._rates = {level: KeepRate() for level in LEVELS}

    def keep_rate(self, prompt_id: str) -> KeepRate:
        """Return the keep rate of prompts at the level of this one."""
        return self._rates[self._level(prompt_id)]

    def end_step(self, stats: Sequence[GroupStats]) -> None:
        """Add the groups of a step."""
        mixed: dict[Level, list[bool]] = {level: [] for level in LEVELS}
        for group in stats:
            mixed[self._level(group.prompt_id)].append(group.is_mixed)
        for level, flags in mixed.items():
            self._rates[level].end_step(len(flags), sum(flags))
        for group in stats:
            all_correct = group.num_correct == group.num_responses
            other: Level = "mixed" if group.num_correct else "all_wrong"
            self._levels[group.prompt_id] = "all_correct" if all_correct else other

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": dict(self._levels),
            "rates": {level: rate.state_dict() for level, rate in self._rates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # in checkpoints of earlier versions a prompt has a list, whose first entry is the level
        levels: Mapping[str, Any] = state["prompts"]
        self._levels = {
            key: levels[key] if isinstance(levels[key], str) else levels[key][0] for key in levels
        }
        for level, rate in self._rates.items():
            rate.load_state_dict(state["rates"][level])

    def _level(self, prompt_id: str) -> Level:
        return self._levels.get(prompt_id, "unseen")


class PromptCursor:
    """A position in the prompt stream that can move back."""

    def __init__(self, prompts: PromptStream) -> None:
        self.next_index = 0
        self._prompts = prompts

    def prompt(self, prompt_index: int) -> Prompt:
        return self._prompts.at(prompt_index)

    def draw(self) -> int:
        """Return the next prompt index."""
        index, self.next_index = self.next_index, self.next_index + 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "next_index": self.next_index,
            "prompts": self._prompts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `state_dict` returned.

        Raises:
            DataError: the state belongs to other prompts or another order.
        """
        next_index = int(state["next_index"])
        self._prompts.check_state(state["prompts"])
        if next_index < 0:
            raise ValueError(f"next_index = {next_index}")
        self.next_index = next_index
