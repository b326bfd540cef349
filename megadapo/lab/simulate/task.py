"""A virtual task: response lengths, prompts with a hidden difficulty, and the policy's answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megadapo.data.group import Failure, Score
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError
from megadapo.observe.run_records import RunRecords
from megadapo.plan.responses import (
    KEPT_SHARE,
    NORMAL_95,
    PROMPT_TOKENS,
    Lengths,
    LogNormalLengths,
    usual_lengths,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUANTILES = np.linspace(-6.0, 6.0, 2401)
_SHARES = np.array([0.5 * math.erfc(-score / math.sqrt(2.0)) for score in _QUANTILES])

CORRECT, INCORRECT = "correct", "incorrect"
"""Texts of virtual responses."""


class EmpiricalLengths:
    """The distribution of measured lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        if not len(lengths) or min(lengths) < 1:
            raise DataError("response lengths must be at least one number, each at least 1 token")
        self._sorted = np.sort(np.asarray(lengths, dtype=np.int64))

    def at(self, scores: np.ndarray) -> np.ndarray:
        shares = np.interp(scores, _QUANTILES, _SHARES)
        places = np.minimum((shares * len(self._sorted)).astype(int), len(self._sorted) - 1)
        lengths: np.ndarray = self._sorted[places]
        return lengths


def read_lengths(path: Path) -> Lengths:
    """Read lengths from a file with a number a line, or from a run folder.

    Raises:
        DataError: the path has no lengths; the error names it.
    """
    if path.is_dir():
        return run_lengths(path)
    try:
        words = path.read_text(encoding="utf-8").split()
        return EmpiricalLengths([int(word) for word in words])
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a file of lengths, one a line: {error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def run_lengths(folder: Path) -> Lengths:
    """Return the lengths of a run's saved groups, or a fit to its metrics.

    A run that saves few of its groups prefers those it trained on. Then the metrics are better.
    """
    run = RunRecords(folder)
    num_sampled = sum(record.get("groups/sampled") or 0 for record in run.steps)
    groups = [list(one.group.lengths) for step in run.saved_steps for one in run.groups(step)]
    if groups and len(groups) >= 0.9 * num_sampled:
        return EmpiricalLengths([length for group in groups for length in group])
    record = run.need_steps()[-1]
    mean, quantile_95 = record["response_length/mean"], record["response_length/p95"]
    assert mean is not None and quantile_95 is not None, "every step records them"
    largest = mean * math.exp(0.5 * NORMAL_95**2)
    # a mean above the percentile, or far below it, is not log-normal: take the nearest that is
    return LogNormalLengths.of(mean, float(np.clip(quantile_95, 1.0001 * mean, 0.9999 * largest)))


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The kinds of prompts in a task.

    A prompt is solved (all responses correct), unsolvable (all incorrect), or in between: then each
    response is correct with the prompt's own probability, from a Beta(2, 2) distribution.
    """

    lengths: Lengths = usual_lengths(4800.0)
    keep_rate: float = KEPT_SHARE
    """Share of mixed groups."""
    solved_share: float | None = None
    """Share of solved prompts; None: as many as unsolvable ones."""
    num_prompts: int = 4000
    """Number of prompts; few, so that a difficulty memory has seen all after a few steps."""
    num_responses: int = 16
    """Responses per group."""
    max_tokens: int = 20480
    """Length limit of a response."""
    prompt_tokens: int = PROMPT_TOKENS
    between_prompts: float = 0.3
    """Share of the variance of log-lengths between prompts; the rest is within groups."""
    length_difficulty: float = 0.3
    """Correlation of a prompt's log-length with its difficulty."""
    seed: int = 0

    @property
    def between_share(self) -> float:
        """Share of prompts that are neither solved nor unsolvable.

        Raises:
            ConfigError: such prompts cannot give so many mixed groups.
        """
        share = self.keep_rate / self.largest_keep_rate
        if not 0.0 < share <= 1.0 - (self.solved_share or 0.0):
            raise ConfigError(
                f"{self.keep_rate} of groups mixed needs {share:.3f} of prompts that are solved at "
                f"times, beside {self.solved_share or 0.0} that are always solved: all shares must "
                "be above 0 and add up to at most 1"
            )
        return share

    @property
    def largest_keep_rate(self) -> float:
        """The keep rate without solved and unsolvable prompts: 1 - 2 E[p^G] for Beta(2, 2)."""
        size = self.num_responses
        return 1.0 - 12.0 / ((size + 2) * (size + 3))

    @property
    def solved(self) -> float:
        """Share of solved prompts."""
        return (1.0 - self.between_share) / 2 if self.solved_share is None else self.solved_share

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values; measured lengths are not listed."""
        lengths = self.lengths
        listed = asdict(lengths) if isinstance(lengths, LogNormalLengths) else "measured"
        return {**vars(self), "lengths": listed}


@dataclass(frozen=True)
class Draw:
    """The policy's responses to one prompt with one set of seeds and weights."""

    lengths: np.ndarray  # [G] int64
    correct: np.ndarray  # [G] bool
    is_mixed: bool


class ToyTask:
    """Prompts and answers; the same seeds and number of draws give the same answers everywhere."""

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.prompts = [
            Prompt(
                id=str(index),
                messages=(("user", str(index)),),
                ground_truth=CORRECT,
                data_source="",
            )
            for index in range(settings.num_prompts)
        ]
        generator = np.random.default_rng(settings.seed)
        self._probabilities = _probabilities(settings, generator)
        self._scores = _length_scores(settings, self._probabilities, generator)
        self._draws: dict[tuple[int, int], Draw] = {}

    def draw(self, prompt_ids: Sequence[int], seeds: Sequence[int], *, age: int = 0) -> Draw:
        """Return the responses to a prompt with these seeds.

        Args:
            age: publications of weights since the first request with these seeds. Other weights
                give other responses.
        """
        key, settings, prompt = (seeds[0], age), self.settings, prompt_ids[0]
        if key in self._draws:
            return self._draws[key]
        generator = np.random.default_rng([seeds[0], age] if age else seeds[0])
        within = generator.standard_normal(len(seeds))
        scores = (
            math.sqrt(settings.between_prompts) * self._scores[prompt]
            + math.sqrt(1.0 - settings.between_prompts) * within
        )
        correct = generator.random(len(seeds)) < self._probabilities[prompt]
        self._draws[key] = Draw(
            lengths=np.minimum(settings.lengths.at(scores), settings.max_tokens),
            correct=correct,
            is_mixed=0 < int(correct.sum()) < len(seeds),
        )
        return self._draws[key]


def task_tokenizer(settings: TaskSettings) -> PreTrainedTokenizerBase:
    """Return a tokenizer of a task's prompts, whose first token is the prompt's number.

    The sampler calls only `encode`.
    """
    rest = [0] * (settings.prompt_tokens - 1)
    stand_in = SimpleNamespace(chat_template=None, encode=lambda text: [int(text), *rest])
    return cast("PreTrainedTokenizerBase", stand_in)


class TaskVerifier:
    """A verifier that reads correctness off a virtual response."""

    num_threads = 1

    def score_group(
        self,
        prompt: Prompt,
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        returns: Sequence[float] = (),
    ) -> list[Score]:
        return [_SCORES[text == prompt.ground_truth] for text in texts]

    def count_failure(self, failure: Failure, prompt: Prompt) -> None:
        """Never called: virtual responses have no environment."""


_SCORES = {
    correct: Score(
        reward=1.0 if correct else -1.0, correct=correct, answer="", symbolic_correct=None
    )
    for correct in (True, False)
}


def _probabilities(settings: TaskSettings, generator: np.random.Generator) -> np.ndarray:
    """Draw the probability of a correct response for each prompt, [num_prompts]."""
    kinds = generator.random(settings.num_prompts)
    between = generator.beta(2.0, 2.0, settings.num_prompts)
    solved = kinds < settings.solved
    return np.where(
        solved, 1.0, np.where(kinds < settings.solved + settings.between_share, between, 0.0)
    )


def _length_scores(
    settings: TaskSettings, probabilities: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw the normal score of each prompt's typical length, higher for harder prompts, [N]."""
    ranks = np.empty(len(probabilities))
    # break ties at random: solved prompts do not all have one length
    order = np.lexsort((generator.random(len(probabilities)), -probabilities))
    ranks[order] = np.arange(len(probabilities))
    spread = math.sqrt(12.0) * ((ranks + 0.5) / len(probabilities) - 0.5)
    noise = generator.standard_normal(len(probabilities))
    rho = settings.length_difficulty
    return rho * spread + math.sqrt(1.0 - rho * rho) * noise
