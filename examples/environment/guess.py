"""A game of several turns: find a hidden number by guessing."""

import re

from megadapo.environments.environment import Action, Environment, Observation, Task


class Guess(Environment):
    """Answers each guess with "higher" or "lower". A found number earns 1 and ends the game."""

    def reset(self, task: Task) -> None:
        """Hide the prompt's ground truth; its text names the range, as in "from 12 to 25"."""
        self.hidden = int(task.ground_truth)
        self.first, self.last = map(int, re.findall(r"\d+", task.messages[-1]["content"]))
        self.possible = range(self.first, self.last + 1)

    def step(self, action: Action) -> Observation:
        """Compare a guess, the last number of a turn, with the hidden number.

        Metrics count guesses, turns with "notes" before the guess, and guesses that are "wasted",
        as earlier answers have ruled them out.
        """
        numbers = re.findall(r"[0-9]{1,9}", action.text)
        guess = int(numbers[-1]) if numbers else self.first - 1
        metrics: dict[str, float] = {
            "guesses": 1,
            "notes": len(numbers) > 1,
            "wasted": guess not in self.possible,
        }
        if guess == self.hidden:
            return Observation(reward=1.0, done=True, metrics=metrics)
        if not self.first <= guess <= self.last:
            return _say(f"not a number from {self.first} to {self.last}", metrics)
        start, stop = self.possible.start, self.possible.stop
        if guess < self.hidden:
            self.possible = range(max(start, guess + 1), stop)
            return _say("higher", metrics)
        self.possible = range(start, min(stop, guess))
        return _say("lower", metrics)


def _say(text: str, metrics: dict[str, float]) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}], metrics=metrics)
