"""Weight updates of an engine with expert parallelism, as far as a CPU can test them.

vLLM's CPU experts ignore which experts a rank holds, so such an engine cannot generate there. It
loads and repacks its shards, so the weights after an update can be compared with vLLM's own load.
"""

import pytest
import ray
import torch

from megadapo.rollout.config import RolloutConfig
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import call_all
from tests.support.weights.actors import start_senders, start_silent_engine

CONFIG = RolloutConfig(
    tensor_parallel=2, expert_parallel=True, max_response_tokens=16, max_num_seqs=8
)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("local_ray")]


def test_update_gives_every_rank_what_vllm_loads_from_the_checkpoint(tmp_path):
    """No expert is on the wrong rank, in the wrong place or split."""
    first, second = [
        make_engine_model(tmp_path / f"model-{seed}", seed=seed, family="Qwen3Moe")
        for seed in (1, 2)
    ]
    loaded = start_silent_engine(second, tmp_path, CONFIG, weights_from="folder")
    (expected,) = call_all(loaded, "fingerprints")
    loaded.shutdown()
    experts = [name for name in expected[0] if name.endswith(("w13_weight", "w2_weight"))]
    assert len(experts) == 2 * 3
    assert all(expected[0][name][0][0] == 2 for name in experts), "4 experts on 2 ranks"
    assert all(expected[0][name] != expected[1][name] for name in experts)

    engines = start_silent_engine(first, tmp_path, CONFIG)
    for sizes in ({}, {"tp_size": 2}, {"num_dp": 2, "ep_size": 2}):
        senders = start_senders(first, **sizes)
        publisher = Publisher(
            senders, engines, WeightsConfig(bucket_mib=0.05, verify="every"), tensor_parallel=2,
            expert_parallel=True, dtype=torch.float32,
        )  # fmt: skip
        publisher.publish(1)
        (before,) = call_all(engines, "fingerprints")
        assert all(before[0][name] != expected[0][name] for name in experts)
        ray.get([sender.load.remote(second) for sender in senders])
        publisher.publish(2)
        (after,) = call_all(engines, "fingerprints")
        assert after == expected
        for sender in senders:
            ray.kill(sender)
    engines.shutdown()
