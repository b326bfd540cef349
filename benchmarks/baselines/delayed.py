"""The environment of `benchmarks/environments.py`, whose processes load nothing large with it."""

import time

from megadapo.environments.environment import Action, Environment, Observation


class Delayed(Environment):
    """An environment that answers each turn after some seconds.

    Args:
        turns: number of turns.
        delay: seconds.
    """

    def __init__(self, turns: int, delay: float) -> None:
        self._num_left, self._delay = turns, delay

    def step(self, action: Action) -> Observation:
        time.sleep(self._delay)
        self._num_left -= 1
        if not self._num_left:
            return Observation(done=True)
        return Observation(messages=[{"role": "user", "content": "Go on."}])
