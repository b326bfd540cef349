"""Games for tests of episodes; each action adds a line to a file, so that a test can count them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from examples.environment.guess import Guess
from megadapo.environments.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Observation,
    Task,
)


class Count(Environment):
    """Ends after `length` turns, and rewards each with its number.

    Args:
        log: file that gets the text of every action.
        failing: number of the turn on which it fails.
        num_failures: number of failures on an action, after which it works.
        hello: text of a message of `reset`.
        reply: text of each observation; {} is the turn's number.
        in_turn: append the reply to the model's own turn, after this text; else it ends.
        is_call: whether its actions are calls.
        frame: frame of the reply in the model's own turn.
    """

    def __init__(
        self,
        log: str,
        length: int = 3,
        pause_s: float = 0.0,
        failing: int = -1,
        num_failures: int = 1000,
        hello: str = "",
        reply: str = "turn {}",
        in_turn: str = "",
        is_call: bool = True,
        frame: str = "{}",
    ) -> None:
        self._log, self._length, self._pause_s = Path(log), length, pause_s
        self._failing, self._hello, self._reply = failing, hello, reply
        self._num_failures = num_failures
        self._in_turn, self._turn = in_turn, 0
        self.stop = (in_turn,) if in_turn else ()
        self._is_call, self.output = is_call, frame

    def reset(self, task: Task) -> Observation | None:
        if not self._hello:
            return None
        return Observation(messages=[{"role": "user", "content": self._hello}])

    def state(self) -> int:
        return self._turn

    def restore(self, task: Task, state: int) -> None:
        self._turn = state

    def step(self, action: Action) -> Observation:
        with self._log.open("a") as file:
            file.write(repr(action.text) + "\n")
        time.sleep(self._pause_s)
        self._turn += 1
        num_tries = self._log.read_text().splitlines().count(repr(action.text))
        if self._turn == self._failing and num_tries <= self._num_failures:
            raise EnvironmentFailure("the server is gone")
        has_ended = self._in_turn not in action.text
        text = self._reply.format(self._turn)
        shown = {"text": text} if self._in_turn else {"messages": [_message(text)]}
        return Observation(
            **shown,
            reward=float(self._turn),
            done=has_ended or self._turn == self._length,
            is_call=self._is_call,
            metrics={"calls": float(len(action.tool_calls)), "bad": float(bool(action.problem))},
        )


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Tokens(Environment):
    """Answers with token ids, and writes the ids of each action to a file of JSON lines.

    Args:
        log: the file.
        answers: token ids after each turn; the turn behind them ends the episode.
        hello: token ids behind the prompt.
    """

    uses_tokens = True

    def __init__(self, log: str, answers: list[list[int]], hello: list[int] | None = None) -> None:
        self._log, self._answers, self._hello = Path(log), list(answers), hello

    def _add(self, *given: object) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(given) + "\n")

    def reset(self, task: Task) -> Observation | None:
        self._add(task.prompt_ids)
        return None if self._hello is None else Observation(token_ids=self._hello)

    def step(self, action: Action) -> Observation:
        self._add(action.token_ids, action.logprobs, action.text)
        if not self._answers:
            return Observation(reward=1.0, done=True)
        return Observation(token_ids=self._answers.pop(0))


class OddSum(Environment):
    """Ends after two turns, rewards one with the gold answer, and fails on an even one."""

    def reset(self, task: Task) -> None:
        self._gold, self._num_turns = task.ground_truth, 0
        print("asked for", self._gold)

    def step(self, action: Action) -> Observation:
        self._num_turns += 1
        if int(self._gold) % 2 == 0:
            raise ValueError(f"no sum of {self._gold}")
        is_right = self._gold in action.text
        return Observation(
            messages=[_message("right" if is_right else "wrong, try again")],
            reward=float(is_right),
            done=self._num_turns == 2,
        )


class CountedGuess(Guess):
    """The example's game; adds EPISODE/TURN of each action to the file `log`, on disk at once."""

    def __init__(self, log: str) -> None:
        self._log, self._turn = log, 0

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._episode, self._turn = task.episode, 0

    def state(self) -> list[int]:
        return [self._turn, self.possible.start, self.possible.stop]

    def restore(self, task: Task, state: list[int]) -> None:
        self.reset(task)
        self._turn, self.possible = state[0], range(*state[1:])

    def step(self, action: Action) -> Observation:
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{self._episode}/{self._turn}\n".encode())
        os.fsync(file)
        os.close(file)
        self._turn += 1
        # long enough to be killed in
        time.sleep(0.05)
        return super().step(action)
