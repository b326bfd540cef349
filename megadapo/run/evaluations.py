"""The held-out evaluations of a run: when each is asked, and when it is waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import CheckpointError
from megadapo.observe.metrics.records import EvaluationRecord, read_evaluations
from megadapo.rollout.journal.answer_log import AnswerLog, answers_path
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.evaluation import Evaluation, EvaluationUnderWay, HeldOut
from megadapo.rollout.sampling.interleaving import InterleavedEngines
from megadapo.run.sampling import Phases, Questions
from megadapo.run.state.checkpoint import EVALUATING, Checkpoint, load
from megadapo.weights.disk.files import Files

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""How long to wait for the reserved engine at a time, while the rest of a run is looked after."""


@dataclass(frozen=True, kw_only=True)
class ReservedEngine:
    """The engine of the held-out problems: it keeps its weights while the others get newer ones."""

    engines: Engines
    """Of that one engine."""
    publish: Callable[[int], object]
    """Gives it the trainer's present weights, as this policy version, and a copy of them to
    whoever gives them to it again should it be lost."""
    watch: Callable[[], None]
    """Looks after the rest of the run; may raise what ends it."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedEvaluation:
    """One that was under way when a run stopped, of weights that it had moved on from."""

    step: int
    trainer_folder: Path | None
    """Where the trainer's weights of that step are; None: they are those that it starts with."""
    files: Files = field(default_factory=dict, repr=False)
    """In that folder."""


def find_unfinished(
    config: RunConfig, checkpoint: Checkpoint | None
) -> tuple[UnfinishedEvaluation | None, list[str]]:
    """The evaluation that a run goes on with, and what to tell the user about one that is lost."""
    step = None if checkpoint is None else checkpoint.state.get(EVALUATING)
    if checkpoint is None or step is None or step == checkpoint.step:
        return None, []
    if any(record.step == step for record in read_evaluations(config.run.folder)):
        return None, []
    lost = f"the evaluation of step {step}, which was under way, is left out: "
    if config.evaluation.num_engines == 0:
        return None, [lost + 'it needs evaluation.placement = "engine"']
    if step == 0:
        return UnfinishedEvaluation(step=step, trainer_folder=None), []
    try:
        of_step = load(checkpoint.path.with_name(f"step-{step}"))
    except (CheckpointError, OSError) as error:
        return None, [f"{lost}{error}"]
    return UnfinishedEvaluation(
        step=step, trainer_folder=of_step.trainer_folder, files=of_step.files
    ), []


class Evaluations:
    """Scores published weights on the held-out problems: alone, beside training's rollouts, or on
    an engine of their own."""

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        questions: Questions,
        phases: Phases,
        *,
        fingerprint: Callable[[], str],
        folder: Path | None,
        reserved: ReservedEngine | None = None,
    ) -> None:
        """Start with none under way.

        Args:
            phases: where waiting for an evaluation is a phase.
            fingerprint: names the trainer's present weights.
            folder: where the answers of an evaluation under way are kept; None: nowhere.
            reserved: the engine that evaluation.placement = "engine" asks for.
        """
        self.sampling_engines = InterleavedEngines(engines)
        """The engines for whom training samples from."""
        self._config = config
        self._engines = engines
        self._questions = questions
        self._phases = phases
        self._fingerprint = fingerprint
        self._folder = folder
        self._reserved = reserved
        self._polling = threading.Lock()
        self._step = 0
        self._under_way: EvaluationUnderWay | None = None
        self._closing = ExitStack()
        self._finished: list[EvaluationRecord] = []

    def begin(self, step: int) -> None:
        """Score the published weights, at once or while training goes on.

        One that is still under way is waited for: the reserved engine holds the weights of one.

        Raises:
            DataError: there are no held-out problems.
            InfraError: an engine failed.
        """
        self.finish()
        is_last = step == self._config.run.num_steps
        # after the last step the others have nothing else to do
        reserved = None if is_last else self._reserved
        with self._phases.phase("evaluate"):
            if reserved is not None:
                reserved.publish(step)
            under_way = EvaluationUnderWay(
                self._engines if reserved is None else reserved.engines,
                self._questions.scorer,
                self._held_out(),
                self._answers(step),
            )
        if under_way.num_answered_before:
            logger.info(
                "the evaluation of step %d goes on: %d problems are answered",
                *(step, under_way.num_answered_before),
            )
        self._step, self._under_way = step, self._closing.enter_context(under_way)
        if reserved is not None:
            under_way.ask()
        elif self._config.evaluation.placement == "alone" or is_last:
            self.finish()
        else:
            self.sampling_engines.evaluation = under_way

    @property
    def on_reserved(self) -> int | None:
        """Step of the weights that the reserved engine is scoring; None: it has nothing to do."""
        return None if self._reserved is None or self._under_way is None else self._step

    def drain_warnings(self) -> list[str]:
        """One line for every time that the reserved engine was lost since the last call."""
        return [] if self._reserved is None else self._reserved.engines.drain_warnings()

    def finish_pending(self) -> None:
        """Wait for the evaluation under way if it shares the engines with training.

        Raises:
            InfraError: an engine failed.
        """
        if self._reserved is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the evaluation under way, if there is one; nothing may be sampled.

        Raises:
            InfraError: an engine failed.
        """
        with self._polling:
            under_way, self._under_way = self._under_way, None
        self.sampling_engines.evaluation = None
        if under_way is None:
            return
        with self._phases.phase("evaluate"), self._closing:
            reserved = self._reserved
            while reserved is not None and reserved.engines.num_in_flight:
                under_way.poll(WAIT_S)
                reserved.watch()
            result = under_way.finish()
        self._finished.append(_record(self._step, under_way.policy_version, result))

    def check(self) -> None:
        """Take what the reserved engine has answered, and look after it; any thread may call it.

        Raises:
            InfraError: it is lost for good.
        """
        if self._reserved is not None and self._polling.acquire(blocking=False):
            try:
                self._reserved.engines.check()
                if self._under_way is not None:
                    self._under_way.poll()
            finally:
                self._polling.release()

    def take_finished(self) -> list[EvaluationRecord]:
        """Hand over what has been scored since the last call, without waiting."""
        self.check()
        if self._reserved is not None and self._under_way is not None and self._under_way.answered:
            self.finish()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Give up what is under way."""
        with self._polling:
            self._under_way = None
            self._closing.close()

    def _held_out(self) -> HeldOut:
        config = self._config
        return HeldOut.of(
            self._questions.held_out,
            config.evaluation,
            tokenizer=self._questions.tokenizer,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
            tools=config.rollout.tools,
        )

    def _answers(self, step: int) -> AnswerLog | None:
        if self._folder is None:
            return None
        reward = self._config.reward
        scored = f"{self._fingerprint()} {reward.rule} {reward.decide}"
        return AnswerLog(answers_path(self._folder, step), scored)


def _record(step: int, policy_version: int, result: Evaluation) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        policy_version=policy_version,
        accuracy=result.accuracy,
        standard_error=result.standard_error,
        num_problems=result.num_problems,
        samples_per_problem=result.samples_per_problem,
        response_length=result.response_length_mean,
    )
