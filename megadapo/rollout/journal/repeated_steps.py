"""Steps whose batch follows from the engines' speed, out of the journal as a whole.

Where groups wait for a later step, whole or in part, which of them had come back in time decides
what is trained on. A run that repeats such a step after a kill takes the very batch it had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.sampling.batch_state import decode_batch, encode_batch
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler


class RepeatedSteps:
    """A sampler whose steps are journaled, each with the state that it left."""

    def __init__(self, sampler: Sampler, journal: Journal, config: SamplingConfig) -> None:
        """`config`: what the sampler fills batches by."""
        self._sampler = sampler
        self._journal = journal
        self._config = config

    def next_batch(self) -> SampledBatch:
        """Return the batch that the journal has for this place, or a new one.

        Raises:
            SamplingError: too few groups have a signal.
            InfraError: an engine failed.
        """
        place = self._place()
        known = self._journal.find_step(place)
        if known is not None:
            self._sampler.load_state_dict(known["state"])
            batch = decode_batch(known["batch"])
            return replace(batch, num_from_journal=batch.num_sampled)
        batch = self._sampler.next_batch()
        entry = {"batch": encode_batch(batch), "state": self._sampler.state_dict()}
        self._journal.append_step(place, entry)
        return batch

    def wait(self) -> None:
        """Nothing is sampled behind the caller's back."""

    def state_dict(self) -> dict[str, Any]:
        """Return where sampling stands, as JSON can hold it."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged.
            DataError: it belongs to other prompts.
        """
        self._sampler.load_state_dict(state)

    def _place(self) -> bytes:
        """A name of where sampling stands, given the weights."""
        state = self._sampler.state_dict()
        waiting = [[entry["order"] for entry in state[key]] for key in ("reserve", "unfinished")]
        config = self._config.model_dump(mode="json", exclude={"journal", "journal_fsync"})
        name = json.dumps([config, state["drawing"], waiting], sort_keys=True)
        return hashlib.sha256(name.encode()).digest()
