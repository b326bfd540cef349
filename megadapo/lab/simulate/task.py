"""A virtual task: prompts with a hidden difficulty, and what the policy would answer to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError
from megadapo.lab.simulate.lengths import Lengths, LogNormalLengths
from megadapo.rewards.dapo_math import Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RIGHT, WRONG = "right", "wrong"
"""Texts of virtual responses."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What kind of prompts there are.

    A prompt is solved for good (all responses right), hopeless (all wrong), or between: then each
    response is right with a chance of its own, from a Beta(2, 2) distribution.
    """

    lengths: Lengths = LogNormalLengths.of(4800.0, 12000.0)
    keep_rate: float = 0.35
    """Share of groups with a signal."""
    solved_share: float | None = None
    """Share of prompts solved for good; none: half of those that are not between."""
    num_prompts: int = 4000
    """Few, so that a memory of their difficulty has seen all of them after a few steps."""
    num_responses: int = 16
    """Of a group."""
    max_tokens: int = 20480
    """Longest response."""
    prompt_tokens: int = 200
    between_prompts: float = 0.3
    """Share of the variance of log-lengths that lies between prompts, not within their groups."""
    length_difficulty: float = 0.3
    """Correlation of a prompt's log-length with its difficulty."""
    seed: int = 0

    @property
    def between_share(self) -> float:
        """Share of prompts that are neither solved nor cannot_make_batch.

        Raises:
            ConfigError: more groups should have a signal than such prompts could give.
        """
        share = self.keep_rate / self.largest_keep_rate
        if not 0.0 < share <= 1.0 - (self.solved_share or 0.0):
            raise ConfigError(
                f"a share of {self.keep_rate} of groups with a signal takes a share of {share:.3f} "
                f"of prompts that are solved at times, beside {self.solved_share or 0.0} that are "
                "solved for good: all shares are above 0 and add up to at most 1"
            )
        return share

    @property
    def largest_keep_rate(self) -> float:
        """The keep rate if no prompt were solved for good or cannot_make_batch."""
        return _signal_chance(self.num_responses)

    @property
    def solved(self) -> float:
        """Share of prompts solved for good."""
        return (1.0 - self.between_share) / 2 if self.solved_share is None else self.solved_share


@dataclass(frozen=True)
class Draw:
    """What the policy would answer to one prompt with one set of seeds."""

    lengths: np.ndarray  # [G] int64
    correct: np.ndarray  # [G] bool
    is_mixed: bool


class Task:
    """Prompts and answers; the same seeds give the same answers under every policy."""

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.prompts = [
            Prompt(
                id=str(index), messages=(("user", str(index)),), ground_truth=RIGHT, data_source=""
            )
            for index in range(settings.num_prompts)
        ]
        generator = np.random.default_rng(settings.seed)
        self._chances = _chances(settings, generator)
        self._scores = _group_scores(settings, self._chances, generator)
        self._draws: dict[int, Draw] = {}

    def draw(self, prompt_ids: Sequence[int], seeds: Sequence[int]) -> Draw:
        """Return the responses that a prompt gets with these seeds."""
        known = self._draws.get(seeds[0])
        if known is None:
            known = self._draws[seeds[0]] = self._draw(prompt_ids[0], seeds)
        return known

    def _draw(self, prompt: int, seeds: Sequence[int]) -> Draw:
        settings = self.settings
        generator = np.random.default_rng(seeds[0])
        within = generator.standard_normal(len(seeds))
        scores = (
            math.sqrt(settings.between_prompts) * self._scores[prompt]
            + math.sqrt(1.0 - settings.between_prompts) * within
        )
        correct = generator.random(len(seeds)) < self._chances[prompt]
        return Draw(
            lengths=np.minimum(settings.lengths.at(scores), settings.max_tokens),
            correct=correct,
            is_mixed=0 < int(correct.sum()) < len(seeds),
        )


class TaskTokenizer:
    """Stands in for a tokenizer: the first token of a prompt is its number."""

    chat_template = None

    def __init__(self, prompt_tokens: int) -> None:
        self._rest = [0] * (prompt_tokens - 1)

    def encode(self, text: str) -> list[int]:
        return [int(text), *self._rest]

    @property
    def as_tokenizer(self) -> PreTrainedTokenizerBase:
        """Itself, as what the sampler asks for: it calls nothing but `encode`."""
        return cast("PreTrainedTokenizerBase", self)


class TaskVerifier:
    """Reads off a virtual response whether it is right."""

    num_threads = 1

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        return [_SCORES[text == prompt.ground_truth] for text in texts]


_SCORES = {
    right: Score(reward=1.0 if right else -1.0, correct=right, answer="", symbolic_correct=None)
    for right in (True, False)
}


def _signal_chance(num_responses: int) -> float:
    """Chance of a group with a signal where its prompt's own chance is Beta(2, 2): 1 - 2 E[p^G]."""
    size = num_responses
    return 1.0 - 12.0 / ((size + 2) * (size + 3))


def _chances(settings: TaskSettings, generator: np.random.Generator) -> np.ndarray:
    """[num_prompts] chance of each prompt that a response is right."""
    kinds = generator.random(settings.num_prompts)
    between = generator.beta(2.0, 2.0, settings.num_prompts)
    solved = kinds < settings.solved
    return np.where(
        solved, 1.0, np.where(kinds < settings.solved + settings.between_share, between, 0.0)
    )


def _group_scores(
    settings: TaskSettings, chances: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """[num_prompts] normal score of each prompt's typical length; harder ones tend to be higher."""
    ranks = np.empty(len(chances))
    # ties are broken at random: solved prompts are not all of one length
    ranks[np.lexsort((generator.random(len(chances)), -chances))] = np.arange(len(chances))
    spread = math.sqrt(12.0) * ((ranks + 0.5) / len(chances) - 0.5)
    noise = generator.standard_normal(len(chances))
    rho = settings.length_difficulty
    return rho * spread + math.sqrt(1.0 - rho * rho) * noise
