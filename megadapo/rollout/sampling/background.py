"""A sampler that fills batches in a thread of its own while the trainer updates the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megadapo.rollout.sampling.reserve import SamplerState
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch

POLL_S = 0.05
"""Longest time for which the thread waits for the engines before it lets the driver in."""


class BackgroundSampler:
    """A sampler with a thread; its methods are the sampler's, and wait until it can do them."""

    def __init__(self, sampler: Sampler, num_steps: int) -> None:
        """`num_steps`: number of steps of the run; no batch is sampled for a later one."""
        self._sampler = sampler
        self._num_steps = num_steps
        self._turn = threading.Condition()
        self._num_visitors = 0
        """Number of calls that wait for the thread to leave the sampler."""
        self._works = False
        """Whether the thread may use the engines."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def next_batch(self) -> SampledBatch:
        """Return the batch of the next step."""
        with self._inside():
            self._works = True
        with self._inside(lambda: self._sampler.can_take):
            return self._sampler.take()

    def wait_until_can_pause(self) -> None:
        """Wait until the mode allows a pause; the engines generate meanwhile."""
        with self._inside(self._may_pause):
            pass

    def pause_for_weights(self) -> None:
        """Stop everything in flight, as soon as the mode allows it."""
        with self._inside(self._may_pause):
            self._works = False
            self._sampler.pause_for_weights()

    def resume_sampling(self, policy_version: int, weights: str = "") -> None:
        """Continue with new weights; where batches are whole, from the next `next_batch` on."""
        with self._inside():
            self._sampler.resume_sampling(policy_version, weights)
            # otherwise an evaluation may use the idle engines first
            self._works = self._sampler.config.carries and policy_version < self._num_steps

    def state_dict(self) -> SamplerState:
        """Return the sampler's state."""
        with self._inside(raises=False):
            return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, as JSON values."""
        with self._inside():
            self._sampler.load_state_dict(state)

    def close(self) -> None:
        """End the thread and all scoring."""
        self._is_closing = True
        with self._inside(raises=False):
            self._turn.notify_all()
        self._thread.join()
        self._sampler.close()

    @property
    def _is_over(self) -> bool:
        """Whether no group is generated any more, because the last step has its batch."""
        return not self._sampler.config.carries and self._sampler.step > self._num_steps

    def _may_pause(self) -> bool:
        return not self._works or self._is_over or self._sampler.can_pause

    @contextmanager
    def _inside(
        self, is_ready: Callable[[], bool] = lambda: True, *, raises: bool = True
    ) -> Iterator[None]:
        """Use the sampler while its thread waits, once the sampler is ready.

        Raises:
            BaseException: the error that ended the thread, if `raises`.
        """
        self._num_visitors += 1
        with self._turn:
            self._num_visitors -= 1
            try:
                while True:
                    if self._error is not None and raises:
                        raise self._error
                    if self._error is not None or is_ready():
                        break
                    self._turn.notify_all()
                    self._turn.wait()
                yield
            finally:
                self._turn.notify_all()

    def _run(self) -> None:
        with self._turn:
            while not self._is_closing:
                if self._num_visitors or not self._works or self._is_over:
                    self._turn.wait(POLL_S)
                    continue
                try:
                    is_busy = self._sampler.turn(POLL_S)
                except Exception as error:
                    # a boundary: the next call of the driver raises it
                    self._error = error
                    self._works = False
                    is_busy = False
                self._turn.notify_all()
                self._turn.wait(0.0 if is_busy else POLL_S)
