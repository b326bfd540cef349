"""Samplers over scripted engines, and a comparison of their batches."""

import json
from dataclasses import replace

import numpy as np

from megadapo.codec import encode
from megadapo.data.prompts import PromptStream
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.scripted_engines import (
    AtOnce,
    PlainTokenizer,
    RightAtLeast,
    make_prompts,
)

MAX_TOKENS = 12
HALF = 28
"""A bound that about half of the responses reach with the sum of their digits."""
RARE = 58
"""A bound that a response of about one group in seven reaches."""


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
        # the speed of scoring decides as well which groups finish in time
        named.setdefault("new_executor", AtOnce)
    config = {"prompts_per_step": 8, "responses_per_prompt": 3, **config}
    return Sampler(
        engines,
        PromptStream(make_prompts(num_prompts), seed),
        judge or RightAtLeast(bound),
        SamplingConfig(**config),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
        **{"episodes": EpisodeRequests(tokenizer=PlainTokenizer(), seed=seed), **named},
    )


def saved_state(sampler: Sampler) -> dict:
    """Return the sampler's state as a checkpoint holds it."""
    text = json.dumps(sampler.state_dict(), default=encode, allow_nan=False)
    return json.loads(text)


def take(sampler: Sampler, num_steps: int) -> list[SampledBatch]:
    """Return the batches of a number of steps, each of which publishes weights."""
    batches = []
    for _ in range(num_steps):
        batches.append(sampler.next_batch())
        # as an update of the weights does; the sampler does not show its engines
        sampler._engines.policy_version += 1
    return batches


def contents(batches: list[SampledBatch]) -> list[str]:
    """Return all that does not depend on the engines' speed, as text so that NaN equals NaN."""
    found = []
    for batch in batches:
        stats = [replace(group, seconds=0.0) for group in batch.stats]
        sizes = [len(batch.to_reserve), len(batch.dropped), len(batch.unscored)]
        sizes += [
            batch.num_from_reserve,
            batch.counts["groups/carried"],
            batch.counts["tokens/recomputed"],
        ]
        # exact, and faster than numpy's own text
        with np.printoptions(override_repr=lambda array: f"{array.dtype}{array.tolist()}"):
            found.append(repr([batch.groups, batch.saved, stats, sizes]))
    return found
