"""What earlier answers say of a prompt: how likely it teaches, how long it takes, whether it rests.

Filled at the end of a step with groups that every repetition of the run would see, so what is
asked for stays a function of seed and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megadapo.rollout.sampling.asking import KeepRate
from megadapo.rollout.sampling.sampled_batch import GroupStats

Level = Literal["unseen", "all_wrong", "mixed", "all_correct"]
LEVELS: tuple[Level, ...] = ("unseen", "all_wrong", "mixed", "all_correct")


class Memory(NamedTuple):
    """What a prompt's latest group was like."""

    level: Level
    num_right_in_a_row: int
    """Latest groups that were all right, one after the other."""
    mean_length: float
    epoch: int
    """When it was asked last."""


class Difficulty:
    """The memory of every prompt seen, and the yield of each level."""

    def __init__(self, *, rest_after: int | None, rest_epochs: int) -> None:
        """`rest_after` groups all right in a row, a prompt is left out for `rest_epochs`."""
        self._rest_after = rest_after
        self._rest_epochs = rest_epochs
        self._memories: dict[str, Memory] = {}
        self._yields = {level: KeepRate() for level in LEVELS}

    def estimate(self, prompt_id: str) -> KeepRate:
        """The yield of prompts like this one."""
        return self._yields[self._level(prompt_id)]

    def mean_length(self, prompt_id: str) -> float:
        """Tokens of the prompt's latest responses; infinite where it has none."""
        memory = self._memories.get(prompt_id)
        return float("inf") if memory is None else memory.mean_length

    def rests(self, prompt_id: str, epoch: int) -> bool:
        """Whether the prompt is left out in this epoch."""
        memory = self._memories.get(prompt_id)
        if memory is None or self._rest_after is None:
            return False
        return (
            memory.num_right_in_a_row >= self._rest_after
            and epoch <= memory.epoch + self._rest_epochs
        )

    def see(self, prompt_id: str, with_signal: bool) -> None:
        """Take in a group of the present step, which `end_step` may count differently."""
        self.estimate(prompt_id).see(with_signal)

    def end_step(self, outcomes: Sequence[GroupStats], epoch_of: Callable[[int], int]) -> None:
        """Take in what a step came to; `epoch_of` an order."""
        asked: dict[Level, list[bool]] = {level: [] for level in LEVELS}
        for outcome in outcomes:
            asked[self._level(outcome.prompt_id)].append(outcome.is_mixed)
        for level, signals in asked.items():
            self._yields[level].end_step(len(signals), sum(signals))
        for outcome in outcomes:
            self._memories[outcome.prompt_id] = self._memory(outcome, epoch_of(outcome.order))

    def _memory(self, outcome: GroupStats, epoch: int) -> Memory:
        before = self._memories.get(outcome.prompt_id)
        num_before = 0 if before is None else before.num_right_in_a_row
        all_correct = outcome.num_correct == outcome.num_responses
        mixed: Level = "mixed" if outcome.num_correct else "all_wrong"
        return Memory(
            level="all_correct" if all_correct else mixed,
            num_right_in_a_row=num_before + 1 if all_correct else 0,
            mean_length=sum(outcome.lengths) / outcome.num_responses,
            epoch=epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": {prompt_id: list(memory) for prompt_id, memory in self._memories.items()},
            "yields": {level: e.state_dict() for level, e in self._yields.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memories = {prompt_id: Memory(*row) for prompt_id, row in state["prompts"].items()}
        for level, estimate in self._yields.items():
            estimate.load_state_dict(state["yields"][level])

    def _level(self, prompt_id: str) -> Level:
        memory = self._memories.get(prompt_id)
        return "unseen" if memory is None else memory.level
