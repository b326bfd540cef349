"""Samplers over scripted engines, and what their batches are compared by."""

from __future__ import annotations

from megadapo.data.prompts import PromptStream
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.sampling.sampler import SampledBatch, Sampler
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.scripted_engines import (
    AtOnce,
    PlainTokenizer,
    RightAtLeast,
    make_prompts,
)

MAX_TOKENS = 12
HALF = 28
"""About every second response has digits that sum to this or more."""
RARE = 58
"""About one group in seven has a response that does."""


def make_sampler(
    engines,
    *,
    bound=HALF,
    num_prompts=50,
    seed=0,
    saved_groups=None,
    judge=None,
    sampler=None,
    **config,
) -> Sampler:
    named = dict(sampler or {}) | ({} if saved_groups is None else {"saved_groups": saved_groups})
    if config.get("max_staleness"):
        # which groups come back in time depends on the speed of scoring as well
        named.setdefault("scoring", AtOnce)
    config = {"prompts_per_step": 8, "responses_per_prompt": 3, **config}
    return Sampler(
        engines,
        PromptStream(make_prompts(num_prompts), seed),
        judge or RightAtLeast(bound),
        SamplingConfig(**config),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
        tokenizer=PlainTokenizer(),
        seed=seed,
        **named,
    )


def take(sampler: Sampler, num_steps: int) -> list[SampledBatch]:
    """The batches of as many steps, each of which publishes weights."""
    batches = []
    for _ in range(num_steps):
        batches.append(sampler.next_batch())
        sampler._engines.policy_version += 1
    return batches


TIMED = {"reward_seconds", "engines", "group_seconds", "num_stopped", "num_surplus"} | {
    "num_tokens_stopped",
    "num_from_journal",
}


def contents(batches: list[SampledBatch]) -> list[str]:
    """All that a step trains on and reports, but what follows from the engines' speed; repr, so
    that NaN equals NaN."""
    return [repr([v for k, v in vars(b).items() if k not in TIMED]) for b in batches]
