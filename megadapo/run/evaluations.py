"""The held-out evaluations of a run: when each is asked, and when it is waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.observe.metrics import EvaluationRecord
from megadapo.rollout.answer_log import AnswerLog, answers_path
from megadapo.rollout.engines import Engines
from megadapo.rollout.evaluation import Evaluation, EvaluationUnderWay, HeldOut
from megadapo.rollout.interleaving import InterleavedEngines
from megadapo.run.sampling import Phases, Questions

logger = logging.getLogger(__name__)


class Evaluations:
    """Scores published weights on the held-out problems, alone or beside training's rollouts."""

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        questions: Questions,
        phases: Phases,
        *,
        fingerprint: Callable[[], str],
        folder: Path | None,
    ) -> None:
        """Start with none under way.

        Args:
            phases: where waiting for an evaluation is a phase.
            fingerprint: names the trainer's present weights.
            folder: where the answers of an evaluation under way are kept; None: nowhere.
        """
        self.sampling_engines = InterleavedEngines(engines)
        """The engines for whom training samples from."""
        self._config = config
        self._engines = engines
        self._questions = questions
        self._phases = phases
        self._fingerprint = fingerprint
        self._folder = folder
        self._step = 0
        self._under_way: EvaluationUnderWay | None = None
        self._closing = ExitStack()
        self._finished: list[EvaluationRecord] = []

    def begin(self, step: int) -> None:
        """Score the engines' present weights, at once or while the next step samples.

        Raises:
            DataError: there are no held-out problems.
            InfraError: an engine failed.
        """
        assert self._under_way is None, "finish() comes first"
        with self._phases.phase("evaluate"):
            under_way = EvaluationUnderWay(
                self._engines, self._questions.verifier, self._held_out(), self._answers(step)
            )
        if under_way.num_answered_before:
            logger.info(
                "the evaluation of step %d goes on: %d problems are answered",
                *(step, under_way.num_answered_before),
            )
        self._step, self._under_way = step, self._closing.enter_context(under_way)
        config = self._config
        if config.evaluation.placement == "alone" or step == config.run.num_steps:
            self.finish()
        else:
            self.sampling_engines.evaluation = self._under_way

    def finish(self) -> None:
        """Wait for the evaluation under way, if there is one; nothing may be sampled.

        Raises:
            InfraError: an engine failed.
        """
        under_way, self._under_way = self._under_way, None
        self.sampling_engines.evaluation = None
        if under_way is None:
            return
        with self._phases.phase("evaluate"), self._closing:
            result = under_way.finish()
        self._finished.append(_record(self._step, under_way.policy_version, result))

    def take_finished(self) -> list[EvaluationRecord]:
        """Hand over what has been scored since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Give up what is under way."""
        self._closing.close()

    def _held_out(self) -> HeldOut:
        config = self._config
        return HeldOut.of(
            self._questions.held_out,
            config.evaluation,
            tokenizer=self._questions.tokenizer,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
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
