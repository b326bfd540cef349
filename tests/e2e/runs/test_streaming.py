"""Batches from real engines do not depend on the engines' number or speed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from transformers import AutoTokenizer

from megadapo.cluster.watch.guard import marked_processes
from megadapo.data.group import Score
from megadapo.data.group_codec import encode_group
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.engine_checks import MAX_RESPONSE_TOKENS, running_engines

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

NUM_STEPS = 3
PROMPTS = [Prompt(f"p{i}", (("user", f"{i * 37 % 100}+{i}=?"),), "", "test") for i in range(60)]


class RightIfOddLength:
    """A scorer that accepts responses of odd length (the limit is even)."""

    num_threads = 1

    def score_group(self, prompt: Prompt, texts: list[str], token_ids: object) -> list[Score]:
        right = [len(text) % 2 == 1 for text in texts]
        return [Score(1.0 if ok else -1.0, ok, "", None) for ok in right]


def sample(engines: Engines, model: Path, **config: object) -> list[SampledBatch]:
    sampler = Sampler(
        engines,
        PromptStream(PROMPTS, 0),
        RightIfOddLength(),
        SamplingConfig(**{"prompts_per_step": 8, "responses_per_prompt": 4, **config}),
        settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_RESPONSE_TOKENS),
        tokenizer=AutoTokenizer.from_pretrained(model),
        seed=3,
    )
    return [sampler.next_batch() for _ in range(NUM_STEPS)]


def tokens(batches: list[SampledBatch]) -> list[list[dict[str, object]]]:
    """Return every token, log-prob bit and score of the batches."""
    return [[encode_group(group) for group in batch.groups] for batch in batches]


@contextmanager
def delays(engines: Engines) -> Iterator[None]:
    """Stop the processes of each engine for a moment, like a slow node."""
    marks = [ray.get(actor.__ray_call__.remote(lambda one: one._mark)) for actor in engines.actors]
    source, over = random.Random(0), threading.Event()

    def disturb() -> None:
        while not over.wait(0.05):
            processes = marked_processes(source.choice(marks))
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    os.kill(process, number)
                time.sleep(source.uniform(0.05, 0.4))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def by_one_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    with running_engines(tiny_model, tmp_path_factory.mktemp("logs"), num_threads=1) as engines:
        return tokens(sample(engines, tiny_model))


@pytest.mark.parametrize("num_engines", [2, 3])
def test_batches_equal_those_of_one_engine(
    num_engines: int, by_one_engine: list, tiny_model: Path, tmp_path: Path
) -> None:
    settings = {"num_engines": num_engines, "num_threads": 1, "max_num_seqs": 8}
    with running_engines(tiny_model, tmp_path, **settings) as engines, delays(engines):
        assert tokens(sample(engines, tiny_model)) == by_one_engine


def test_partial_responses_continue(by_one_engine: list, tiny_model: Path, tmp_path: Path) -> None:
    """A stopped and continued group repeats no token and misses none."""
    settings = {"num_engines": 2, "num_threads": 1, "max_num_seqs": 16}
    with running_engines(tiny_model, tmp_path, **settings) as engines:
        batches = sample(engines, tiny_model, mode="partial", max_staleness=2)
    assert sum(batch.num_carried for batch in batches) > 0
    orders = [group.prompt_index for batch in batches for group in batch.groups]
    assert len(orders) == len(set(orders)) == 8 * NUM_STEPS
    whole = {entry["prompt_index"]: entry for batch in by_one_engine for entry in batch}
    for batch in batches:
        for group in batch.groups:
            assert 0 < sum(group.correct) < 4
            for response in group.responses:
                assert len(response.policy_versions) == len(response.token_ids)
                assert response.finish_reason in ("stop", "length")
    assert whole.keys() & set(orders), "no group in common, so nothing was compared"
