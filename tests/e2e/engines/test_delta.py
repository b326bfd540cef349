"""Updates of real engines of two ranks: deltas, and experts."""

from collections.abc import Iterator

import pytest
import ray
import torch
from ray.actor import ActorHandle

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.publish import Publisher
from megadapo.weights.config import WeightsConfig
from tests.support.models.tiny_models import ENGINE, make_engine_model, make_model
from tests.support.rollout.engine_checks import call_all
from tests.support.weights.actors import start_senders, start_silent_engine

NUM_UPDATES = 20
DENSITY = 0.046
STEP = 1.52e-6
"""Step that changes as many elements of weights of 0.02 as 16 updates at a rate of 1e-6."""
CONFIG = RolloutConfig(tensor_parallel=2, max_response_tokens=16, max_num_seqs=8)
WEIGHTS = WeightsConfig(verify="every", mode="delta")
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "tie_word_embeddings": True,
}  # fmt: skip

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("local_ray")]


EXPERTS = RolloutConfig(
    tensor_parallel=2, expert_parallel=True, max_response_tokens=16, max_num_seqs=8
)


def test_update_gives_every_rank_what_vllm_loads_from_the_checkpoint(tmp_path):
    """No expert is on the wrong rank, in the wrong place or split, as far as a CPU can test it.

    vLLM's CPU experts ignore which experts a rank holds, so such an engine cannot generate there.
    It loads and repacks its shards, so its weights can be compared with vLLM's own load.
    """
    first, second = [
        make_engine_model(tmp_path / f"model-{seed}", seed=seed, family="Qwen3Moe")
        for seed in (1, 2)
    ]
    loaded = start_silent_engine(second, tmp_path, EXPERTS, weights_from="folder")
    (expected,) = call_all(loaded, "fingerprints")
    loaded.shutdown()
    experts = [name for name in expected[0] if name.endswith(("w13_weight", "w2_weight"))]
    assert len(experts) == 2 * 3
    assert all(expected[0][name][0][0] == 2 for name in experts), "4 experts on 2 ranks"
    assert all(expected[0][name] != expected[1][name] for name in experts)

    engines = start_silent_engine(first, tmp_path, EXPERTS)
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


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Iterator[tuple[Engines, list[ActorHandle]]]:
    """An engine of two ranks, and four trainer ranks."""
    root = tmp_path_factory.mktemp("deltas")
    folder = make_model(
        root / "model", "Qwen2", sizes=ENGINE, std=0.02, seed=1, tokenizer=True, **SIZES
    )
    engines = start_silent_engine(folder, root, CONFIG, dtype="bfloat16")
    yield engines, start_senders(folder, tp_size=2, pp_size=2)
    engines.shutdown()


def test_delta_updates_give_the_bits_of_a_full_update(peers):
    """No element is missed, changed twice or misplaced, and no delta applies to other weights."""
    engines, senders = peers
    publisher = publisher_of(peers, WEIGHTS, deltas=True)
    first = publisher.publish(0)
    assert first.in_full and first.verified and first.density is None

    reports = []
    for number in range(1, NUM_UPDATES + 1):
        train(senders, number)
        reports.append(publisher.publish(number))
    densities = [report.density for report in reports]
    shares = [report.num_bytes / first.num_bytes for report in reports]
    assert not any(report.in_full for report in reports) and engines.policy_version == NUM_UPDATES
    assert max(abs(density - DENSITY) for density in densities) < 0.004, densities
    assert max(shares) <= 0.05, list(zip(densities, shares, strict=True))
    after_changes = call_all(engines, "fingerprints")

    assert publisher.drain_warnings() == []
    assert publisher_of(peers, WeightsConfig()).publish(0).in_full
    assert call_all(engines, "fingerprints") == after_changes

    # the engine has the right bits, but from another publisher
    train(senders, 77)
    again = publisher.publish(NUM_UPDATES + 1)
    (note,) = publisher.drain_warnings()
    assert again.in_full and "all weights are sent" in note
    assert call_all(engines, "fingerprints") != after_changes


def publisher_of(peers, config, **options) -> Publisher:
    engines, senders = peers
    return Publisher(senders, engines, config, tensor_parallel=2, dtype=torch.bfloat16, **options)


def train(senders, seed) -> None:
    ray.get([sender.train.remote(seed, STEP) for sender in senders])
