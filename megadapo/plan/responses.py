"""The responses of a step: their number and lengths, by the recipe or by given lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from megadapo.config import RunConfig
from megadapo.errors import ConfigError

MEAN_SHARE = 4800 / 20480
"""Mean response length over the limit, as in published runs."""
QUANTILE_95 = 2.5
"""95 % quantile of response lengths over their mean."""
PROMPT_TOKENS = 200
"""Tokens of a mean prompt."""
KEPT_SHARE = 0.35
"""Share of mixed groups, if only those are kept."""
NORMAL_95 = NormalDist().inv_cdf(0.95)


class Lengths(Protocol):
    """A distribution of response lengths."""

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Turn standard normal scores into lengths in tokens, at least 1, before any cap."""
        ...


@dataclass(frozen=True)
class LogNormalLengths:
    """Lengths exp(mu + sigma * score)."""

    mu: float
    sigma: float

    @classmethod
    def of(cls, mean: float, quantile_95: float) -> LogNormalLengths:
        """Return the distribution with this mean and 95 % quantile.

        Two distributions have both; this is the one with the lighter tail.

        Raises:
            ConfigError: no log-normal distribution has both.
        """
        ratio = math.log(quantile_95 / mean) if 0.0 < mean < quantile_95 else math.nan
        square = NORMAL_95**2 - 2.0 * ratio
        if not square >= 0.0:
            raise ConfigError(
                f"no log-normal distribution has a mean of {mean:g} and 95 % below "
                f"{quantile_95:g} tokens: the second number must be 1 to 3.8 times the first"
            )
        sigma = NORMAL_95 - math.sqrt(square)
        return cls(math.log(mean) - 0.5 * sigma * sigma, sigma)

    def at(self, scores: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = np.rint(np.exp(self.mu + self.sigma * scores)).astype(np.int64)
        return lengths.clip(1)


def usual_lengths(mean: float) -> LogNormalLengths:
    """Return the usual distribution with a mean."""
    return LogNormalLengths.of(mean, QUANTILE_95 * mean)


def mean_response(config: RunConfig) -> float:
    """Return the tokens of a mean response, before the limit cuts long ones."""
    return MEAN_SHARE * config.rollout.max_response_tokens


@dataclass(frozen=True)
class Responses:
    """The responses that engines generate for a step, longest first."""

    lengths: np.ndarray  # [N] int64
    prompt_tokens: int

    @classmethod
    def of(
        cls,
        config: RunConfig,
        lengths: Lengths | None = None,
        *,
        keep_rate: float = KEPT_SHARE,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> Responses:
        """Return a recipe's responses, at even quantiles of the lengths."""
        sampling = config.sampling
        kept = keep_rate if sampling.selection == "signal" else 1.0
        number = math.ceil(sampling.prompts_per_step * sampling.responses_per_prompt / kept)
        normal = NormalDist()
        scores = np.array([normal.inv_cdf((place + 0.5) / number) for place in range(number)])
        found = (lengths or usual_lengths(mean_response(config))).at(scores[::-1])
        return cls(np.minimum(found, config.rollout.max_response_tokens), prompt_tokens)

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return float(self.lengths.mean())

    @property
    def mean_sequence(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt_tokens + self.mean

    @cached_property
    def token_sequence(self) -> float:
        """Mean tokens of a token's prompt and response: a long response has more tokens."""
        return self.prompt_tokens + float((self.lengths**2.0).mean()) / self.mean

    @property
    def running_context(self) -> float:
        """Mean tokens in the cache of a running response."""
        return (self.token_sequence + self.prompt_tokens) / 2
