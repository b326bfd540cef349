"""A game of several turns: find a hidden number by guessing."""

import re

from megadapo.environments.environment import Action, Environment, Observation, Task


class Guess(Environment):
    """Answers each guess with "higher" or "lower". A found number earns 1 and ends the game."""

    def reset(self, task: Task) -> None:
        """Hide the prompt's ground truth; its text names the range, as in "from 12 to 57"."""
        self.hidden = int(task.ground_truth)
        self.first, self.last = map(int, re.findall(r"\d+", task.messages[-1]["content"]))
        self.possible = range(self.first, self.last + 1)

    def step(self, action: Action) -> Observation:
        """Compare a guess with the hidden number; "wasted" ones could not be the number."""
        text = action.text.strip()
        guess = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else self.first - 1
        counts = {"guesses": 1, "wasted": guess not in self.possible}
        if guess == self.hidden:
            return Observation(reward=1.0, done=True, metrics=counts)
        if not self.first <= guess <= self.last:
            return _say(f"not a number from {self.first} to {self.last}", counts)
        start, stop = self.possible.start, self.possible.stop
        if guess < self.hidden:
            self.possible = range(max(start, guess + 1), stop)
            return _say("higher", counts)
        self.possible = range(start, min(stop, guess))
        return _say("lower", counts)


def _say(text: str, counts: dict[str, float]) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}], metrics=counts)
