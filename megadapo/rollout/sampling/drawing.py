"""Which prompt is asked next: the stream, without those that rest or need not be asked again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.rollout.sampling.difficulty import Difficulty


class PromptCursor:
    """A place in the prompt stream that can be gone back to."""

    def __init__(self, prompts: PromptStream, difficulty: Difficulty) -> None:
        self.next_order = 0
        self._prompts = prompts
        self._difficulty = difficulty
        self._settled: set[int] = set()
        """Orders from the next one on that must not be asked."""
        self._resting: list[int] = []
        """Orders left out in this step."""

    def prompt(self, order: int) -> Prompt:
        return self._prompts.at(order)

    def epoch(self, order: int) -> int:
        return self._prompts.epoch(order)

    def draw(self) -> int:
        """Take the next order to be asked for; where all prompts rest, none does."""
        skipped: list[int] = []
        while True:
            order, self.next_order = self.next_order, self.next_order + 1
            if order in self._settled:
                self._settled.remove(order)
            elif len(skipped) < len(self._prompts) and self._rests(order):
                skipped.append(order)
            else:
                self._resting += skipped
                return order

    def begin_at(self, order: int) -> None:
        """Go on from this order, as if nothing behind it had been drawn."""
        self.next_order = order
        self._resting = [resting for resting in self._resting if resting < order]

    def take_num_resting(self) -> int:
        """Prompts left out since this was last asked."""
        num_resting, self._resting = len(self._resting), []
        return num_resting

    def requeue(self, orders: Collection[int]) -> None:
        """Put orders back that were drawn; all others stay drawn."""
        if orders:
            first = min(orders)
            self._settled |= set(range(first, self.next_order)) - set(orders)
            self.next_order = first

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as JSON can hold it."""
        return {
            "next_order": self.next_order,
            "settled": sorted(self._settled),
            "prompts": self._prompts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            DataError: the state belongs to other prompts or another order.
        """
        next_order, settled = int(state["next_order"]), set(map(int, state["settled"]))
        self._prompts.check_state(state["prompts"])
        if next_order < 0:
            raise ValueError(f"next_order = {next_order}")
        self.next_order, self._settled = next_order, settled

    def _rests(self, order: int) -> bool:
        return self._difficulty.rests(self.prompt(order).id, self.epoch(order))
