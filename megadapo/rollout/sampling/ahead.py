"""Sampling one step ahead: the next batch is generated while the trainer updates.

A batch is sampled with the weights of the step before the one that trains on it, so each of its
tokens is one policy version old. The batch that waits belongs to the state of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megadapo.rollout.journal.repeated_steps import RepeatedSteps
from megadapo.rollout.sampling.batch_state import decode_batch, encode_batch
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.scoring import SupportsGenerate


@dataclass(frozen=True)
class Waiting:
    """A batch in a state that is seldom written."""

    batch: SampledBatch

    def to_json(self) -> dict[str, Any]:
        """Return the batch as JSON values; its numbers stay exact."""
        return encode_batch(self.batch)


class AheadSampler:
    """Has a batch ready for each step but the first, from the weights before its own."""

    def __init__(
        self, sampler: Sampler | RepeatedSteps, engines: SupportsGenerate, num_steps: int
    ) -> None:
        """`num_steps`: of the run; nothing is sampled for a step behind the last."""
        self._sampler = sampler
        self._engines = engines
        self._num_steps = num_steps
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sampling ahead")
        self._pending: Future[SampledBatch] | None = None
        self._ready: SampledBatch | None = None

    def next_batch(self) -> SampledBatch:
        """Return the batch of the step after the engines' weights, and begin with the next one's.

        Raises:
            SamplingError: too few groups have a signal.
            InfraError: an engine failed.
        """
        self.wait()
        batch, self._ready = self._ready or self._sampler.next_batch(), None
        if self._engines.policy_version + 1 < self._num_steps:
            self._pending = self._executor.submit(self._sampler.next_batch)
        return batch

    def wait(self) -> None:
        """Wait until nothing is sampled; the engines may take weights then."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._ready = pending.result()

    def state_dict(self) -> dict[str, Any]:
        """Return where sampling stands and the batch that waits; nothing may be sampled.

        The batch becomes JSON values only where the state is written.
        """
        assert self._pending is None, "wait() comes first"
        waiting = None if self._ready is None else Waiting(self._ready)
        return {**self._sampler.state_dict(), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged.
            DataError: it belongs to other prompts.
        """
        self._sampler.load_state_dict(state)
        waiting = state.get("waiting")
        if isinstance(waiting, Waiting):
            self._ready = waiting.batch
        else:
            self._ready = None if waiting is None else decode_batch(waiting)
