"""Steps of an environment, played from a test without an event loop."""

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megadapo.environments.environment import Action, Environment, Observation, Task, ToolCall
from megadapo.environments.results import read_observation


def task(ground_truth: str = "", *, seed: int = 0, episode: str = "", **extra_info: Any) -> Task:
    return Task(
        id="t",
        messages=[{"role": "user", "content": "Begin."}],
        ground_truth=ground_truth,
        extra_info=extra_info,
        seed=seed,
        episode=episode,
    )


class Player:
    """One episode, whose coroutines run in one event loop."""

    def __init__(self, environment: Environment, loop: asyncio.AbstractEventLoop) -> None:
        self.environment, self._loop = environment, loop

    def value(self, returned: Any) -> Any:
        if inspect.isawaitable(returned):
            return self._loop.run_until_complete(returned)
        return returned

    def reset(self, begun: Task) -> Any:
        return self.value(self.environment.reset(begun))

    def turn(self, text: str, calls: Sequence[ToolCall] = (), *, problem: str = "") -> Observation:
        action = Action(text=text, tool_calls=calls, problem=problem)
        found = self.value(self.environment.step(action))
        assert isinstance(found, Observation)
        # the process of an environment refuses other observations
        read_observation(found, "step")
        return found

    def call(self, name: str, **arguments: Any) -> str:
        """Return the result of one tool call."""
        found = self.turn("", [ToolCall(name=name, arguments=arguments)])
        (message,) = found.messages
        assert message["role"] == "tool" and not found.done
        return message["content"]


@contextmanager
def playing(environment: Environment, begun: Task | None = None) -> Iterator[Player]:
    """Play an episode, which begins if a task is given, and ends with the block."""
    loop = asyncio.new_event_loop()
    player = Player(environment, loop)
    try:
        if begun is not None:
            player.reset(begun)
        yield player
    finally:
        player.value(environment.close())
        loop.close()
