"""Sampling one step ahead: the next batch is generated while the trainer updates.

A batch is sampled with the weights before those of its step, so each of its tokens is one policy
version old. The batch that waits is part of the run's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megadapo.rollout.sampling.sampled_batch import SampledBatch, decode_batch, encode_batch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.scoring import SupportsGenerate


@dataclass(frozen=True)
class UnencodedBatch:
    """A batch in a state. Most states are never written, so it is encoded only on writing."""

    batch: SampledBatch

    def to_json(self) -> dict[str, Any]:
        """Return the batch as JSON values; its numbers stay exact."""
        return encode_batch(self.batch)


class AheadSampler:
    """A sampler that fills the next step's batch while the trainer updates the weights."""

    def __init__(self, sampler: Sampler, engines: SupportsGenerate, num_steps: int) -> None:
        """`num_steps`: number of steps of the run; no batch is sampled for a later one."""
        self._sampler = sampler
        self._engines = engines
        self._num_steps = num_steps
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sampling ahead")
        self._pending: Future[SampledBatch] | None = None
        self._ready: SampledBatch | None = None
        self._before: dict[str, Any] | None = None
        """The sampler's state before it began the batch that is pending or waits."""

    def next_batch(self) -> SampledBatch:
        """Return the batch of the next step, and start to sample the one after it.

        Raises:
            SamplingError: too few groups are mixed.
            InfraError: an engine failed.
        """
        self.wait()
        batch, self._ready = self._ready or self._sampler.next_batch(), None
        self._before = None
        if self._engines.policy_version + 1 < self._num_steps:
            self._before = self._sampler.state_dict()
            self._pending = self._executor.submit(self._sampler.next_batch)
        return batch

    def wait(self) -> None:
        """Wait until the sampling in progress ends, so that the engines can take weights."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._ready = pending.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state and the waiting batch.

        A batch that is pending or has failed is left out, and a resumed run samples it again.
        """
        if self._ready is None and self._before is not None:
            return {**self._before, "waiting": None}
        waiting = None if self._ready is None else UnencodedBatch(self._ready)
        return {**self._sampler.state_dict(), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            CheckpointError: the state is damaged.
            DataError: the state belongs to other prompts.
        """
        self._sampler.load_state_dict(state)
        waiting = state.get("waiting")
        if isinstance(waiting, UnencodedBatch):
            self._ready = waiting.batch
        else:
            self._ready = None if waiting is None else decode_batch(waiting)
