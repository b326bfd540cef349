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
from megadapo.rollout.types import OpenGroup, SamplingSettings
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import Reference, all_finished, bits, make_requests
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


def test_tokens_match_their_version_and_repeat(local_ray, tmp_path):
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
    first = [replace(group, settings=SETTINGS) for group in make_requests(48, 1)]
    groups, periods = first, []
    for version, folder in enumerate(folders, start=1):
        ray.get(sender.load.remote(folder))
        publisher.publish(version)
        engines.submit(groups)
        finished: list[OpenGroup] = []
        while len(finished) < 8:
            finished += engines.finished()
        groups = engines.stop(keep=True).unfinished if version < 3 else ()
        finished += all_finished(engines)
        periods.append((finished, groups))
    assert_repeats(engines, publisher, sender, folders, first, periods)
    answers = [(group.prompt_ids, response) for group in finished for response in group.responses]
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


def assert_repeats(engines, publisher, sender, folders, groups, periods) -> None:
    """Generate everything again: each response stops at the token of the first time."""
    for version, (folder, period) in enumerate(zip(folders, periods, strict=True), start=1):
        ray.get(sender.load.remote(folder))
        publisher.publish(version)
        finished, stopped = period
        expected = {one.key: one.responses for one in (*finished, *stopped)}
        until = {one.key: (one.num_tokens,) for one in stopped}
        engines.submit([replace(one, stop_at_tokens=until.get(one.key, ())) for one in groups])
        again = {one.key: one.responses for one in all_finished(engines)}
        assert bits(again) == bits(expected)
        for key, (response,) in again.items():
            assert (response.policy_versions == expected[key][0].policy_versions).all()
        groups = [replace(one, responses=again[one.key]) for one in stopped]
