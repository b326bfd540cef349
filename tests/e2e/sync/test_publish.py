"""Weight updates from trainers of every split into real vLLM engines."""

import signal
from pathlib import Path

import pytest
import ray
import torch
from ray.actor import ActorHandle

from megadapo.errors import InfraError
from megadapo.rollout.pool.publish import Publisher
from megadapo.weights.config import WeightsConfig
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import EOS, Reference, start_engines
from tests.support.weights.actors import GREEDY, PROMPTS, greedy, start_actors, start_senders

LAYOUTS = [{}, {"tp_size": 2, "pp_size": 2}]
SMALL_BUCKETS = WeightsConfig(bucket_mib=0.05, verify="every")

pytestmark = pytest.mark.usefixtures("local_ray")


class RemotePublisher(Publisher):
    """A publisher whose trainer ranks count as ranks on another node than the engines."""

    def _topology(self, ranks, engine_nodes, engine_gpus):
        elsewhere = [("elsewhere", gpu) for _, gpu in ranks]
        topology = super()._topology(elsewhere, engine_nodes, engine_gpus)
        assert topology.transport == "nccl"
        return topology


@pytest.fixture(scope="module")
def trainer_processes(local_ray: None) -> list[ActorHandle]:
    return start_actors(4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two models of each kind, which differ in their weights only.

    The untied kind has one KV head: under TP 2 vLLM repeats it and Megatron cuts through it.
    """
    root = tmp_path_factory.mktemp("publish")
    kinds = {
        "tied": {"tie_word_embeddings": True},
        "untied": {"tie_word_embeddings": False, "num_key_value_heads": 1},
        "experts": {"family": "Qwen3Moe"},
    }
    return {
        kind: [make_engine_model(root / f"{kind}-{seed}", seed=seed, **sizes) for seed in (1, 2)]
        for kind, sizes in kinds.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind,engine", [
    # every whole run publishes a tied model, and compares engine and trainer at each step
    pytest.param("tied", {"num_engines": 2}, marks=pytest.mark.full),
    ("untied", {"tensor_parallel": 2}),
    # tests/distributed/trainer/test_experts.py updates experts without engines
    pytest.param("experts", {}, marks=pytest.mark.full),
    pytest.param("tied", {"pipeline_parallel": 2}, marks=pytest.mark.full),
])  # fmt: skip
def test_engines_answer_like_checkpoint(folders, trainer_processes, tmp_path, kind, engine):
    """Late, partial or misplaced weights, or a stale prefix cache, would change an answer."""
    first, second = folders[kind]
    split = {"tensor_parallel": 1, **engine}
    count = split.pop("num_engines", 1)
    expected = [[by_transformers(folder)] * count for folder in (first, second)]

    engines = start_engines(first, tmp_path, **engine)
    answers, before = [], []
    for number, sizes in enumerate(LAYOUTS):
        senders = start_senders(first, trainer_processes, **sizes)
        publisher = Publisher(senders, engines, SMALL_BUCKETS, **split, dtype=torch.float32)
        report = publisher.publish(2 * number + 1)
        assert report.verified and report.num_rounds > 1
        assert report.num_bytes == publisher.plan.num_bytes
        assert_equal(greedy(engines), expected[0], atol=1e-5)
        ray.get([sender.load.remote(second) for sender in senders])
        publisher.publish(2 * number + 2, stop_generating=lambda: before.append(greedy(engines)))
        # once, and up to then the engines generate with their old weights
        assert_equal(before[-1], expected[0], atol=1e-5)
        assert len(before) == number + 1 and engines.policy_version == 2 * number + 2
        answers.append(greedy(engines))
        assert_equal(answers[-1], expected[1], atol=1e-5)
        assert_equal(answers[-1], answers[0], atol=0)
    if count > 1:
        # two engines of one node: the first forwards to the second
        ray.get([sender.load.remote(first) for sender in senders])
        publisher = RemotePublisher(senders, engines, SMALL_BUCKETS, **split, dtype=torch.float32)
        assert publisher.publish(9).num_bytes == publisher.plan.num_bytes
        assert_equal(greedy(engines), expected[0], atol=1e-5)
    loses_its_sender(start_senders(second), engines, split)
    another = folders["untied" if kind == "tied" else "tied"][0]
    refuses_another_model(start_senders(another, trainer_processes), engines, split)
    engines.shutdown()


def by_transformers(folder):
    """Return greedy tokens and their log-probs for each prompt."""
    reference, answers = Reference(folder), []
    for prompt in PROMPTS:
        tokens: list[int] = []
        while len(tokens) < GREEDY.max_tokens and EOS not in tokens:
            tokens.append(int(reference.distribution([*prompt, *tokens])[-1].argmax()))
        answers.append((tuple(tokens), torch.from_numpy(reference.logprobs(prompt, tokens))))
    return answers


def loses_its_sender(senders, engines, split) -> None:
    """The update names the dead process, does not wait for it, and does not count as done."""
    publisher = Publisher(senders, engines, SMALL_BUCKETS, **split, dtype=torch.float32)
    publisher.publish(10)
    ray.get(senders[0].signal_at.remote(1, signal.SIGKILL))
    with pytest.raises(InfraError, match=r"buckets 1 to \d+ of \d+: trainer rank 0 died"):
        publisher.publish(11)
    assert engines.policy_version == 10
    with pytest.raises(InfraError, match="unfinished weight update"):
        greedy(engines)


def refuses_another_model(senders, engines, split) -> None:
    config = WeightsConfig(bucket_mib=0.05)
    publisher = Publisher(senders, engines, config, **split, dtype=torch.float32)
    with pytest.raises(InfraError, match="Trainer and engine differ in "):
        publisher.publish(1)


def assert_equal(actual, expected, *, atol) -> None:
    for engine, reference in zip(actual, expected, strict=True):
        for (tokens, logprobs), (its_tokens, its_logprobs) in zip(engine, reference, strict=True):
            assert tokens == its_tokens
            torch.testing.assert_close(logprobs, its_logprobs, rtol=0, atol=atol)
