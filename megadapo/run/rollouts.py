"""Where the loop gets its groups from and sends its weights to: engines, or what was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megadapo.config import RunConfig
from megadapo.data.batch import Group
from megadapo.errors import CheckpointError
from megadapo.observe.metrics.records import EvaluationRecord
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.journal.repeated_steps import RepeatedSteps
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.ahead import AheadSampler
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.selection import in_training_order
from megadapo.run.evaluations import Evaluations
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.sampling import Questions
from megadapo.run.state.checkpoint import EVALUATING
from megadapo.run.step_metrics import verifier_note
from megadapo.weights.sync.publish import Publisher, PublishReport

SAMPLER_STATE = "sampler"
FINISH_S = 10.0
"""How long a finished run waits for the second opinion on its last answers."""


def without_samples(state: Mapping[str, Any]) -> dict[str, Any]:
    """A run's state without the groups that wait for a later step, whole or in part."""
    sampler = state.get(SAMPLER_STATE)
    if sampler is None:
        return dict(state)
    waiting = {"waiting": None} if "waiting" in sampler else {}
    return {**state, SAMPLER_STATE: {**sampler, "reserve": [], "unfinished": [], **waiting}}


class Rollouts(Protocol):
    """A source of batches that takes the weights trained on them."""

    @property
    def policy_version(self) -> int:
        """Of the weights published last."""
        ...

    def next_batch(self) -> SampledBatch:
        """Return the groups of the step after the published weights."""
        ...

    def wait(self) -> None:
        """Wait until nothing is sampled or scored any more; the engines can take weights then."""
        ...

    def publish(self, policy_version: int) -> PublishReport | None:
        """Take the trainer's weights; what that took, where there are engines."""
        ...

    def evaluate(self, step: int) -> None:
        """Score the published weights on the held-out problems, or begin to."""
        ...

    def scored(self) -> list[EvaluationRecord]:
        """Return the evaluations that have finished since the last call."""
        ...

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        """Return whether each response is right by the comparison that does not decide."""
        ...

    def drain_warnings(self) -> list[str]:
        """Return what happened since the last call that must not be missed."""
        ...

    def closing_notes(self) -> Iterator[str]:
        """Yield what is to be said after the last step."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint must hold for going on after the last batch."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        ...


@dataclass(frozen=True, kw_only=True)
class LiveRollouts:
    """The engines and what feeds them."""

    config: RunConfig
    engines: Engines
    sampler: Sampler | RepeatedSteps | AheadSampler
    questions: Questions
    evaluations: Evaluations
    publisher: Publisher
    gpus: GpuSharing
    journal: Journal | None = None
    """Where the sampler keeps its groups until a checkpoint holds their step."""

    @property
    def policy_version(self) -> int:
        return self.engines.policy_version

    def next_batch(self) -> SampledBatch:
        batch = self.sampler.next_batch()
        if self.config.cluster.engines_sleep:
            self.evaluations.finish_pending()
        self.questions.ask_cross_check(batch)
        groups = in_training_order(
            batch.groups, self.policy_version, self.config.groups_per_mini_batch
        )
        return replace(batch, groups=groups)

    def wait(self) -> None:
        self.sampler.wait()
        self.evaluations.finish_pending()

    def publish(self, policy_version: int) -> PublishReport:
        """Put the trainer's weights into the engines, which then sample as that version."""
        with self.gpus.publishing():
            report = self.publisher.publish(policy_version)
            if self.journal is not None:
                self.journal.begin(policy_version, self.publisher.fingerprint())
        return report

    def evaluate(self, step: int) -> None:
        self.evaluations.begin(step)

    def scored(self) -> list[EvaluationRecord]:
        return self.evaluations.take_finished()

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        return self.questions.cross_checks(group)

    def drain_warnings(self) -> list[str]:
        """Which engines were lost or had other weights, which reward functions failed, and what
        the journal lost."""
        return [
            *(() if self.journal is None else self.journal.drain_warnings()),
            *self.engines.drain_warnings(),
            *self.publisher.drain_warnings(),
            *self.evaluations.drain_warnings(),
            *self.questions.scorer.drain_warnings(),
        ]

    def closing_notes(self) -> Iterator[str]:
        self.questions.verifier.finish_cross_check(FINISH_S)
        yield verifier_note(self.questions.verifier.counts)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {SAMPLER_STATE: self.sampler.state_dict()}
        if self.evaluations.on_reserved is not None:
            state[EVALUATING] = self.evaluations.on_reserved
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged, or of a run that did not sample.
        """
        if SAMPLER_STATE not in state:
            raise CheckpointError(
                "the checkpoint does not say where sampling stands, as it is of a replay: go on "
                "with --replay, or sample in another run.folder"
            )
        self.sampler.load_state_dict(state[SAMPLER_STATE])
