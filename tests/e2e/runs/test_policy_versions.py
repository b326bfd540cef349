"""One real engine under several weights: each token has the log-prob of its version."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import RolloutEngine
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.types import SamplingSettings
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import Reference, all_finished, make_requests
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


def test_token_logprobs_match_their_version(local_ray, tmp_path):
    folders = [make_engine_model(tmp_path / f"model-{seed}", seed=seed) for seed in (1, 2, 3)]
    spec = engine_spec(
        model=str(folders[0]),
        max_model_len=200 + MAX_RESPONSE_TOKENS,
        config=CONFIG,
        log_file=tmp_path / "engine.log",
    )
    engines = Engines([EngineHandle(spec, {"num_cpus": 0}, KeepingEngine)])
    engines.wait_until_ready()
    (sender,) = start_senders(folders[0])
    publisher = Publisher(
        [sender], engines, WeightsConfig(), tensor_parallel=1, dtype=torch.float32
    )
    groups = [replace(group, settings=SETTINGS) for group in make_requests(48, 1)]
    for version, folder in enumerate(folders, start=1):
        ray.get(sender.load.remote(folder))
        publisher.publish(version)
        engines.submit(groups)
        if version < 3:
            finished = 0
            while finished < 8:
                finished += len(engines.finished())
            groups = engines.stop(keep=True).unfinished
    answers = [
        (group.prompt_ids, response)
        for group in all_finished(engines)
        for response in group.responses
    ]
    engines.shutdown()
    assert all((np.diff(response.policy_versions) >= 0).all() for _, response in answers)
    of_three = [one for one in answers if set(one[1].policy_versions) == {1, 2, 3}]
    assert len(of_three) >= 8
    references = [Reference(folder) for folder in folders]
    for prompt, response in answers:
        tables = [one.logprobs(prompt, response.token_ids.tolist()) for one in references]
        table, places = np.stack(tables), np.arange(len(response.token_ids))
        versions = response.policy_versions
        own, following = (table[index, places] for index in (versions - 1, versions % 3))
        assert np.abs(response.logprobs - own).max() < 1e-5
        # else a token of the version before or after would not show
        assert len(set(versions)) == 1 or np.abs(response.logprobs - following).max() > 1e-2
