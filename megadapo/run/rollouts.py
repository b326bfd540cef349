"""Sources of the loop's batches, which also receive the trained weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megadapo.codec import encode
from megadapo.config import RunConfig
from megadapo.data.batch import in_training_order
from megadapo.data.group import Group
from megadapo.data.prompts import PromptStream
from megadapo.errors import CheckpointError
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.publish import Publisher, PublishReport
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.rollout.sampling.reserve import Reserve
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.evaluations import Evaluations, Scored
from megadapo.run.inputs import SamplingInputs
from megadapo.run.processes import GpuSharing
from megadapo.run.state.checkpoint import EVALUATING
from megadapo.run.step.metrics import verifier_summary

SAMPLER_STATE = "sampler"
FINISH_S = 10.0
"""Seconds that a finished run waits for the cross-check of its last answers."""


def without_samples(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's state without finished and unfinished groups kept for a later step."""
    sampler = state.get(SAMPLER_STATE)
    if sampler is None:
        return dict(state)
    empty = {"reserve": encode(Reserve()), "counters": None}
    return {**state, SAMPLER_STATE: {**sampler, **empty}}


def from_first_prompt(state: Mapping[str, Any], prompts: PromptStream) -> dict[str, Any]:
    """Return a run's state with which the sampler begins with the first of other prompts."""
    state = without_samples(state)
    cursor = {"next_index": 0, "prompts": prompts.state_dict()}
    return {**state, SAMPLER_STATE: {**state[SAMPLER_STATE], "cursor": cursor, "schedule": None}}


class Rollouts(ABC):
    """A source of batches that receives the weights trained on them.

    The methods that do nothing suit a source without engines.
    """

    @abstractmethod
    def next_batch(self) -> SampledBatch:
        """Return the groups of the step after the published weights."""

    @abstractmethod
    def publish(self, policy_version: int) -> PublishReport | None:
        """Take the trainer's weights; return how the update went if there are engines."""

    @abstractmethod
    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        """Return the cross-check's result for each response, None where it is not known."""

    def stop_sampling(self) -> None:  # noqa: B027
        """Stop what engines generate, if no later step continues it."""

    def finish_evaluations(self) -> None:  # noqa: B027
        """Wait for evaluations of the present weights before newer ones are published."""

    def evaluate(self, step: int) -> None:  # noqa: B027
        """Start to score the published weights on the held-out problems."""

    def scored(self) -> list[Scored]:
        """Return the evaluations that have finished since the last call."""
        return []

    def drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        return []

    def closing_messages(self) -> Iterator[str]:
        """Yield the messages to show after the last step."""
        return iter(())

    def state_dict(self) -> dict[str, object]:
        """Return the state with which a resumed run continues after the last batch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class LiveRollouts(Rollouts):
    """Rollouts from engines, with sampler, evaluations and weight updates."""

    config: RunConfig
    engines: Engines
    sampler: Sampler | BackgroundSampler
    inputs: SamplingInputs
    evaluations: Evaluations
    publisher: Publisher
    gpus: GpuSharing
    journal: Journal[Group] | None = None
    """The journal that keeps sampled groups until a checkpoint holds their step."""
    host: EpisodeHostActor | None = None

    def next_batch(self) -> SampledBatch:
        batch = self.sampler.next_batch()
        self.inputs.scorer.check_step()
        if self.config.cluster.engines_sleep:
            self.evaluations.finish_pending()
        self.inputs.start_cross_check(batch)
        groups = in_training_order(
            batch.groups, self.engines.policy_version, self.config.groups_per_mini_batch
        )
        return replace(batch, groups=groups)

    def stop_sampling(self) -> None:
        if not self.config.sampling.carries:
            self.sampler.pause_for_weights()

    def finish_evaluations(self) -> None:
        self.evaluations.finish_pending()

    def publish(self, policy_version: int) -> PublishReport:
        """Put the trainer's weights into the engines, which then sample as `policy_version`."""
        if isinstance(self.sampler, BackgroundSampler):
            # before the publication, because an engine that restarts in it gets no weights
            self.sampler.wait_until_can_pause()
        with self.gpus.publishing():
            weights = "" if self.journal is None else self.publisher.fingerprint()
            report = self.publisher.publish(
                policy_version, stop_generating=self.sampler.pause_for_weights
            )
            self.sampler.resume_sampling(policy_version, weights)
        return report

    def evaluate(self, step: int) -> None:
        self.evaluations.begin(step)

    def scored(self) -> list[Scored]:
        return self.evaluations.take_finished()

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        return self.inputs.cross_checks(group)

    def drain_warnings(self) -> list[str]:
        """Return the warnings of all parts: engines, environments, updates, rewards."""
        return [
            *self.engines.drain_warnings(),
            *(() if self.host is None else self.host.drain_warnings()),
            *self.publisher.drain_warnings(),
            *self.evaluations.drain_warnings(),
            *self.inputs.scorer.drain_warnings(),
        ]

    def closing_messages(self) -> Iterator[str]:
        self.inputs.verifier.finish_cross_check(FINISH_S)
        yield verifier_summary(self.inputs.verifier.counts)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {SAMPLER_STATE: self.sampler.state_dict()}
        if self.evaluations.reserved_step is not None:
            state[EVALUATING] = self.evaluations.reserved_step
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler; raise CheckpointError if the run replayed saved rollouts."""
        if SAMPLER_STATE not in state:
            raise CheckpointError(
                "the checkpoint has no state of the sampler because its run replayed saved "
                "rollouts: resume it with --replay, or sample in another run.folder"
            )
        self.sampler.load_state_dict(state[SAMPLER_STATE])
