"""The held-out evaluations of a run: alone, beside rollouts, or on an engine of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megadapo.cluster.calls import Watch
from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.errors import CheckpointError
from megadapo.observe.metrics.records import EvaluationRecord
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.run_records import RunRecords
from megadapo.rollout.journal.journal import EVALUATION, Journal
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.evaluation import (
    Evaluation,
    EvaluationInProgress,
    HeldOutRequests,
    InterleavedEngines,
)
from megadapo.run.inputs import Phases, SamplingInputs
from megadapo.run.state.checkpoint import EVALUATING, Checkpoint, load
from megadapo.run.state.resume import samples_digest
from megadapo.run.step.saved_groups import held_out_groups

logger = logging.getLogger(__name__)

Scored = tuple[EvaluationRecord, Sequence[SavedGroup]]
"""A finished evaluation and the groups to save."""
WAIT_S = 1.0
"""Seconds between two checks of the other processes while the reserved engine is waited for."""


@dataclass(frozen=True, kw_only=True)
class ReservedEngine:
    """The engine for held-out problems, which keeps its weights while the others get newer ones."""

    engines: Engines
    """Pool of this one engine."""
    publish: Callable[[int], object]
    """Publishes the trainer's weights to it; the trainer keeps a copy for a restarted engine."""
    watch: Watch


def find_unfinished(
    config: RunConfig, checkpoint: Checkpoint | None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint whose evaluation was interrupted, to resume it, or None.

    It is older than `checkpoint`. One of step 0 has no files and stands for the weights that the
    run starts with. Return a warning too if an interrupted evaluation cannot be resumed.
    """
    step = None if checkpoint is None else checkpoint.state.get(EVALUATING)
    if checkpoint is None or step is None or step == checkpoint.step:
        return None, []
    if any(record.step == step for record in RunRecords(config.run.folder).evaluations):
        return None, []
    lost = f"the interrupted evaluation of step {step} is skipped: "
    if config.evaluation.num_engines == 0:
        return None, [lost + 'it needs evaluation.placement = "engine"']
    if step == 0:
        return Checkpoint(checkpoint.path.with_name("step-0"), 0, state={}), []
    try:
        return load(checkpoint.path.with_name(f"step-{step}")), []
    except (CheckpointError, OSError) as error:
        return None, [f"{lost}{error}"]


class Evaluations:
    """The evaluations of published weights on the held-out problems; one runs at a time."""

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        inputs: SamplingInputs,
        phases: Phases,
        *,
        fingerprint: Callable[[], str],
        folder: Path | None,
        reserved: ReservedEngine | None = None,
    ) -> None:
        """`folder`: where a running evaluation stores its results; None: it stores none.

        `reserved`: the engine of evaluation.placement = "engine".
        """
        self.sampling_engines = InterleavedEngines(engines)
        """Engines that training samples from."""
        self._config = config
        self._engines = engines
        self._inputs = inputs
        self._phases = phases
        self._fingerprint = fingerprint
        self._folder = folder
        self._reserved = reserved
        self._polling = threading.Lock()
        self._step = 0
        self._running: EvaluationInProgress | None = None
        self._newest: EvaluationInProgress | None = None
        self._closing = ExitStack()
        self._finished: list[Scored] = []

    def begin(self, step: int) -> None:
        """Start to evaluate the published weights; wait with placement "alone" or at the last step.

        The evaluation before ends first, because the reserved engine holds one set of weights.
        """
        self.finish()
        is_last = step == self._config.run.num_steps
        # after the last step the other engines are free
        reserved = None if is_last else self._reserved
        with self._phases.phase("evaluate"):
            if reserved is not None:
                reserved.publish(step)
            running = EvaluationInProgress(
                self._engines if reserved is None else reserved.engines,
                self._inputs.scorer,
                self._held_out(),
                self._journal(step),
            )
        if running.num_from_journal:
            logger.info(
                "resuming the evaluation of step %d: %d problems have results",
                *(step, running.num_from_journal),
            )
        self._step, self._running = step, self._closing.enter_context(running)
        self._newest = running
        if reserved is not None:
            running.submit()
        elif self._config.evaluation.placement == "alone" or is_last:
            self.finish()
        else:
            self.sampling_engines.evaluation = running

    @property
    def reserved_step(self) -> int | None:
        """Step of the weights that the reserved engine evaluates; None if it is idle."""
        return None if self._reserved is None or self._running is None else self._step

    def drain_warnings(self) -> list[str]:
        """Return one line for each loss of the reserved engine since the last call."""
        return [] if self._reserved is None else self._reserved.engines.drain_warnings()

    def finish_pending(self) -> None:
        """Wait for the running evaluation if it shares engines with training."""
        if self._reserved is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the running evaluation, if any; no training response may be in flight."""
        with self._polling:
            running, self._running = self._running, None
        self.sampling_engines.evaluation = None
        if running is None:
            return
        with self._phases.phase("evaluate"), self._closing:
            reserved = self._reserved
            while reserved is not None and reserved.engines.num_in_flight:
                running.poll(WAIT_S)
                reserved.watch.check(without=self.check)
            result = running.finish()
        groups = held_out_groups(self._step, running.groups, self._config, self._inputs.tokenizer)
        self._finished.append((self._record(running, result), groups))
        # its groups may take hundreds of megabytes
        self._newest = None

    def so_far(self) -> EvaluationRecord | None:
        """Return an unfinished evaluation's result on problems with answers; None without any."""
        newest = self._newest
        return None if newest is None or not newest.groups else self._record(newest, newest.so_far)

    def _record(self, running: EvaluationInProgress, result: Evaluation) -> EvaluationRecord:
        return EvaluationRecord(
            step=self._step,
            policy_version=running.policy_version,
            accuracy=result.accuracy,
            score=result.score,
            standard_error=result.standard_error,
            num_problems=result.num_problems,
            samples_per_problem=result.samples_per_problem,
            response_length=result.response_length_mean,
            pass_at={str(k): value for k, value in result.pass_at.items()},
            consensus=result.consensus,
            sets={
                name: {
                    "accuracy": one.accuracy,
                    "score": one.score,
                    "standard_error": one.standard_error,
                    "num_problems": one.num_problems,
                    "response_length": one.response_length_mean,
                    "best_of_all": one.pass_at.get(one.samples_per_problem),
                }
                for name, one in result.sets.items()
            },
        )

    def check(self) -> None:
        """Check the reserved engine and score its new groups; any thread may call this."""
        if self._reserved is not None and self._polling.acquire(blocking=False):
            try:
                self._reserved.engines.check()
                if self._running is not None:
                    self._running.poll()
            finally:
                self._polling.release()

    def take_finished(self) -> list[Scored]:
        """Return the evaluations that ended since the last call, without waiting."""
        self.check()
        if self._reserved is not None and self._running is not None and self._running.is_done:
            self.finish()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Abandon the running evaluation."""
        with self._polling:
            self._running = None
            self._closing.close()

    def _held_out(self) -> HeldOutRequests:
        config = self._config
        return HeldOutRequests.create(
            self._inputs.held_out,
            config.evaluation,
            self._inputs.episodes,
            max_response_tokens=config.rollout.max_response_tokens,
        )

    def _journal(self, step: int) -> Journal[Group] | None:
        if self._folder is None:
            return None
        settings = samples_digest(self._config)
        journal = Journal(Group, self._folder, settings, name=EVALUATION)
        journal.begin(step, self._fingerprint())
        return journal
