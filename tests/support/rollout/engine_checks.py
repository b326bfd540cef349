"""Helpers of the engine tests: start engines, generate, and score with transformers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megadapo.cluster.cluster import Cluster
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.process_log import engine_log
from megadapo.data.group import NO_VERSION, Response, Score
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.rollout.config import RolloutConfig, SamplingConfig
from megadapo.rollout.engine.spec import WeightsFrom
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds
from tests.support.rollout.engine_specs import engine_spec

MAX_PROMPT_TOKENS = 200
MAX_RESPONSE_TOKENS = 48
EOS = 1
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_RESPONSE_TOKENS)


def start_cluster(**config: Any) -> Cluster:
    rollout = RolloutConfig(**config)
    return Cluster(
        ClusterConfig(device="cpu"),
        num_trainer_ranks=1,
        num_engines=rollout.num_engines,
        engine_ranks=rollout.ranks_per_engine,
    )


def start_engines(
    model: Path,
    log_folder: Path,
    cluster: Cluster | None = None,
    *,
    weights_from: WeightsFrom = "trainer",
    **config: Any,
) -> Engines:
    """Start engines for a model, with or without its weights."""
    rollout = RolloutConfig(**{"max_response_tokens": MAX_RESPONSE_TOKENS, **config})
    spec = engine_spec(
        model=str(model),
        max_model_len=MAX_PROMPT_TOKENS + rollout.max_response_tokens,
        weights_from=weights_from,
        config=rollout,
        log_file=engine_log(log_folder.resolve(), 0),
    )
    cluster = cluster or start_cluster(**config)
    engines = Engines(
        [
            EngineHandle(spec.at(number, ()), cluster.engine_options(number))
            for number in range(rollout.num_engines)
        ]
    )
    engines.wait_until_ready()
    return engines


@contextmanager
def running_engines(model: Path, log_folder: Path, **config: Any) -> Iterator[Engines]:
    """Start engines on a cluster of their own, and end both with the block."""
    cluster = start_cluster(**config)
    try:
        engines = start_engines(model, log_folder, cluster, weights_from="folder", **config)
        try:
            yield engines
        finally:
            engines.shutdown()
    finally:
        cluster.shutdown()


def group_request(key: int, prompt_ids: tuple[int, ...], seeds: tuple[int, ...]) -> OpenGroup:
    return OpenGroup(key=key, prompt_ids=prompt_ids, seeds=seeds, settings=SETTINGS)


def make_requests(num_groups: int, num_responses: int, *, name: str = "test") -> list[OpenGroup]:
    """Return groups with prompts of 1 to 170 tokens, some longer than a cache block."""
    source = np.random.default_rng(5)
    return [
        group_request(
            key,
            tuple(source.integers(2, 50, size=1 + key * 37 % 170).tolist()),
            response_seeds(num_responses, name, key),
        )
        for key in range(num_groups)
    ]


def ask(
    engines: Engines,
    groups: Sequence[OpenGroup],
    *,
    temperature: float = 1.0,
    max_tokens: int = MAX_RESPONSE_TOKENS,
    **tools: Any,
) -> dict[int, tuple[Response, ...]]:
    """Return the responses of each group by its key."""
    settings = SamplingSettings(temperature=temperature, top_p=1.0, max_tokens=max_tokens, **tools)
    engines.submit([replace(group, settings=settings) for group in groups])
    answers = {answer.key: answer.responses for answer in all_finished(engines)}
    assert sorted(answers) == sorted(group.key for group in groups)
    return answers


def all_finished(engines: Engines) -> Iterator[OpenGroup]:
    """Yield the groups in flight when they finish."""
    while engines.num_in_flight:
        yield from engines.finished()


def bits(answers: dict[int, tuple[Response, ...]]) -> dict[int, list[tuple[Any, ...]]]:
    """Return all responses in a comparable form, log-probs as bytes."""
    return {
        key: [(r.token_ids.tobytes(), r.logprobs.tobytes(), r.finish_reason, r.text) for r in group]
        for key, group in answers.items()
    }


def call_all(engines: Engines, method: str) -> list[Any]:
    """Return the results of a method without arguments, one per engine."""
    refs = engines.call(method, dict.fromkeys(engines.updatable(), ()))
    return list(engines.gather(refs, doing=method, timeout_s=60, forgive=False).values())


def actor_pid(engines: Engines, index: int) -> int:
    import ray

    pid: int = ray.get(engines.handles[index].actor.location.remote()).pid
    return pid


class Reference:
    """The same model in transformers, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def distribution(self, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probs of the next token after each position, [n, V]."""
        logits = self._model(torch.tensor([list(token_ids)])).logits[0]
        return torch.log_softmax(logits / temperature, dim=-1)

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Return the log-prob of each response token, [n]."""
        tokens = [*prompt, *response]
        table = self.distribution(tokens[:-1], temperature)[len(prompt) - 1 :]
        return table[torch.arange(len(response)), torch.tensor(response)].numpy()


def worst_error(
    reference: Reference,
    groups: Sequence[OpenGroup],
    answers: dict[int, tuple[Response, ...]],
    temperature: float = 1.0,
) -> float:
    """Return the largest difference of a log-prob from the reference."""
    errors = [
        np.abs(
            response.logprobs
            - reference.logprobs(group.prompt_ids, response.token_ids.tolist(), temperature)
        )[response.policy_versions != NO_VERSION].max()
        for group in groups
        for response in answers[group.key]
    ]
    return float(max(errors))


PROMPTS = [Prompt(f"p{i}", (("user", f"{i * 37 % 100}+{i}=?"),), "", "test") for i in range(60)]


class CorrectIfOddLength:
    """A verifier that accepts texts of odd length (the limit is even)."""

    num_threads = 1

    def score_group(self, prompt: Prompt, texts: Sequence[str], token_ids: object) -> list[Score]:
        right = [len(text) % 2 == 1 for text in texts]
        return [Score(1.0 if ok else -1.0, ok, "", None) for ok in right]


def make_sampler(engines: Engines, model: Path, *, prompts_per_step: int) -> Sampler:
    """Return a sampler over real engines."""
    return Sampler(
        engines,
        PromptStream(PROMPTS, 0),
        CorrectIfOddLength(),
        SamplingConfig(prompts_per_step=prompts_per_step, responses_per_prompt=4),
        settings=SETTINGS,
        episodes=EpisodeRequests(tokenizer=AutoTokenizer.from_pretrained(model), seed=3),
    )
