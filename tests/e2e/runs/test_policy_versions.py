"""One real engine under several weights: each token has the log-prob of its version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import ray
import torch

from megadapo.data.group import Response
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import RolloutEngine
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.types import OpenGroup, SamplingSettings
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import (
    Reference,
    all_finished,
    make_requests,
)
from tests.support.rollout.engine_specs import engine_spec
from tests.support.weights.actors import start_senders

MAX_RESPONSE_TOKENS = 120
CONFIG = RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, max_num_seqs=48)
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_RESPONSE_TOKENS)

pytestmark = [pytest.mark.slow, pytest.mark.full]


class KeepingEngine(RolloutEngine):
    """An engine whose updates keep the prefix cache, so that only its salt protects it."""

    async def reset_prefix_cache(self) -> None:
        """Keep all cached prefixes."""


class Started(NamedTuple):
    engines: Engines
    publisher: Publisher
    sender: ray.actor.ActorHandle
    folders: list[Path]

    def publish(self, model: int, version: int) -> None:
        ray.get(self.sender.load.remote(self.folders[model]))
        self.publisher.publish(version)


@pytest.fixture(scope="module")
def started(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """An engine, and a trainer rank with the weights of the first of three models."""
    root = tmp_path_factory.mktemp("versions")
    folders = [make_engine_model(root / f"model-{seed}", seed=seed) for seed in (1, 2, 3)]
    spec = engine_spec(
        model=str(folders[0]),
        max_model_len=200 + MAX_RESPONSE_TOKENS,
        config=CONFIG,
        log_file=root / "engine.log",
    )
    engines = Engines([EngineHandle(spec, {"num_cpus": 0}, KeepingEngine)])
    engines.wait_until_ready()
    (sender,) = start_senders(folders[0])
    publisher = Publisher(
        [sender], engines, WeightsConfig(), tensor_parallel=1, dtype=torch.float32
    )
    yield Started(engines, publisher, sender, folders)
    engines.shutdown()


def stopped_after(count: int, engines: Engines, groups: list[OpenGroup]) -> list[OpenGroup]:
    """Return the groups that were unfinished when enough others had finished."""
    engines.submit(groups)
    while count > 0:
        count -= len(engines.finished())
    return list(engines.stop(keep=True).unfinished)


def test_token_logprobs_match_their_version(started: Started) -> None:
    """A response must not continue with cached keys of earlier weights; versions that are off by a
    token, and misplaced log-probs of a continuation, show as well."""
    engines = started.engines
    groups = [replace(group, settings=SETTINGS) for group in make_requests(48, 1)]
    for model, version in ((0, 1), (1, 2)):
        started.publish(model, version)
        groups = stopped_after(8, engines, groups)
    started.publish(2, 3)
    prompts = {group.key: group.prompt_ids for group in groups}
    engines.submit(groups)
    answers = [
        (prompts[one.key], response) for one in all_finished(engines) for response in one.responses
    ]
    assert all((np.diff(response.policy_versions) >= 0).all() for _, response in answers)
    of_three = [one for one in answers if set(one[1].policy_versions) == {1, 2, 3}]
    assert len(of_three) >= 8
    references = {v: Reference(started.folders[v - 1]) for v in (1, 2, 3)}
    for prompt, response in answers:
        own, others = errors(references, prompt, response)
        assert own < 1e-5
        assert len(set(response.policy_versions)) == 1 or others > 1e-2


def errors(
    references: dict[int, Reference], prompt: tuple[int, ...], response: Response
) -> tuple[float, float]:
    """Largest error of a response's log-probs against each token's own version; and against the
    version that follows, so that a wrong one would show."""
    tables = {
        version: reference.logprobs(prompt, response.token_ids.tolist())
        for version, reference in references.items()
    }
    places = np.arange(len(response.token_ids))
    table = np.stack([tables[version] for version in (1, 2, 3)])
    own = table[response.policy_versions - 1, places]
    other = table[response.policy_versions % 3, places]
    return (
        float(np.abs(response.logprobs - own).max()),
        float(np.abs(response.logprobs - other).max()),
    )
