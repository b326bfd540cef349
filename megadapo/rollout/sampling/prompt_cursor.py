"""The next prompt to request: the stream, without prompts on cooldown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.rollout.sampling.keep_rate import KeepRate
from megadapo.rollout.sampling.statistics import GroupStats

Level = Literal["unseen", "all_wrong", "mixed", "all_correct"]
LEVELS: tuple[Level, ...] = ("unseen", "all_wrong", "mixed", "all_correct")


class PromptRecord(NamedTuple):
    """The latest result of a prompt."""

    level: Level
    num_all_correct: int
    """Number of its latest groups in a row that were all correct."""
    epoch: int
    """Epoch of its latest request."""


class PromptHistory:
    """The latest result of every prompt, and the keep rate of each level.

    The end of a step adds the results that its statistics count. So requests depend on seed and
    weights alone, unless the mode follows the engines' speed.
    """

    def __init__(self, *, rest_after: int | None, rest_epochs: int) -> None:
        """`rest_after`, `rest_epochs`: as in `SamplingConfig`."""
        self._rest_after = rest_after
        self._rest_epochs = rest_epochs
        self._records: dict[str, PromptRecord] = {}
        self._rates = {level: KeepRate() for level in LEVELS}

    def keep_rate(self, prompt_id: str) -> KeepRate:
        """Return the keep rate of prompts at the level of this one."""
        return self._rates[self._level(prompt_id)]

    def on_cooldown(self, prompt_id: str, epoch: int) -> bool:
        """Return whether the prompt is skipped in this epoch."""
        record = self._records.get(prompt_id)
        if record is None or self._rest_after is None:
            return False
        return (
            record.num_all_correct >= self._rest_after and epoch <= record.epoch + self._rest_epochs
        )

    def end_step(self, stats: Sequence[GroupStats], epoch_of: Callable[[int], int]) -> None:
        """Add the groups of a step; `epoch_of` maps a prompt index to its epoch."""
        mixed: dict[Level, list[bool]] = {level: [] for level in LEVELS}
        for group in stats:
            mixed[self._level(group.prompt_id)].append(group.is_mixed)
        for level, flags in mixed.items():
            self._rates[level].end_step(len(flags), sum(flags))
        for group in stats:
            self._records[group.prompt_id] = self._record(group, epoch_of(group.prompt_index))

    def _record(self, group: GroupStats, epoch: int) -> PromptRecord:
        before = self._records.get(group.prompt_id)
        num_before = 0 if before is None else before.num_all_correct
        all_correct = group.num_correct == group.num_responses
        other: Level = "mixed" if group.num_correct else "all_wrong"
        return PromptRecord(
            level="all_correct" if all_correct else other,
            num_all_correct=num_before + 1 if all_correct else 0,
            epoch=epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": {prompt_id: list(record) for prompt_id, record in self._records.items()},
            "rates": {level: rate.state_dict() for level, rate in self._rates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records = {key: PromptRecord(*row) for key, row in state["prompts"].items()}
        for level, rate in self._rates.items():
            rate.load_state_dict(state["rates"][level])

    def _level(self, prompt_id: str) -> Level:
        record = self._records.get(prompt_id)
        return "unseen" if record is None else record.level


class PromptCursor:
    """A position in the prompt stream that can move back."""

    def __init__(self, prompts: PromptStream, history: PromptHistory) -> None:
        self.next_index = 0
        self._prompts = prompts
        self._history = history
        self._skipped: list[int] = []
        """Prompt indices on cooldown that this step skipped."""

    def prompt(self, prompt_index: int) -> Prompt:
        return self._prompts.at(prompt_index)

    def draw(self) -> int:
        """Return the next prompt index; cooldowns are ignored if every prompt is on cooldown."""
        skipped: list[int] = []
        while True:
            index, self.next_index = self.next_index, self.next_index + 1
            if len(skipped) < len(self._prompts) and self._history.on_cooldown(
                self.prompt(index).id, self._prompts.epoch(index)
            ):
                skipped.append(index)
            else:
                self._skipped += skipped
                return index

    def rewind(self, prompt_index: int) -> None:
        """Continue from this index as if no later prompt had been drawn."""
        self.next_index = prompt_index
        self._skipped = [skipped for skipped in self._skipped if skipped < prompt_index]

    def end_step(self, stats: Sequence[GroupStats]) -> int:
        """Add a step's groups to the history; return the number of prompts skipped in it."""
        self._history.end_step(stats, self._prompts.epoch)
        num_skipped, self._skipped = len(self._skipped), []
        return num_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "next_index": self.next_index,
            "skipped": list(self._skipped),
            "prompts": self._prompts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `state_dict` returned.

        Raises:
            DataError: the state belongs to other prompts or another order.
        """
        next_index, skipped = int(state["next_index"]), [int(index) for index in state["skipped"]]
        self._prompts.check_state(state["prompts"])
        if next_index < 0:
            raise ValueError(f"next_index = {next_index}")
        self.next_index, self._skipped = next_index, skipped
