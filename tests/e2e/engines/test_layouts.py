"""Several engines, and one engine over several ranks, on one machine."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megadapo.data.group import encode_group
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.types import response_seeds
from tests.support.rollout.engine_checks import (
    Reference,
    actor_pid,
    ask,
    bits,
    group_request,
    make_requests,
    make_sampler,
    running_engines,
    worst_error,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def batches(engines: Engines, model: Path) -> list[list[dict[str, object]]]:
    """Return every token, log-prob bit and score of three steps."""
    sampler = make_sampler(engines, model, prompts_per_step=8)
    return [[encode_group(group) for group in sampler.next_batch().groups] for _ in range(3)]


@contextmanager
def delays(engines: Engines) -> Iterator[None]:
    """Stop the processes of each engine for a moment, like a slow node."""
    families = [
        [process, *process.children(recursive=True)]
        for process in (psutil.Process(actor_pid(engines, index)) for index in range(3))
    ]
    source, over = random.Random(0), threading.Event()

    def disturb() -> None:
        while not over.wait(0.05):
            processes = source.choice(families)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    process.send_signal(number)
                time.sleep(source.uniform(0.05, 0.4))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_batches_of_three_delayed_engines_equal_those_of_one(tiny_model, tmp_path):
    with running_engines(tiny_model, tmp_path, num_threads=1) as engines:
        expected = batches(engines, tiny_model)
    settings = {"num_engines": 3, "num_threads": 1, "max_num_seqs": 8}
    with running_engines(tiny_model, tmp_path, **settings) as engines, delays(engines):
        assert batches(engines, tiny_model) == expected


def test_tensor_parallel_engine_computes_the_same_model(tiny_model, tmp_path):
    with running_engines(tiny_model, tmp_path, tensor_parallel=2) as engines:
        groups = make_requests(9, 2)
        answers = ask(engines, groups)
        assert worst_error(Reference(tiny_model), groups, answers) < 1e-5
        assert bits(ask(engines, groups)) == bits(answers)


BLOCK_TOKENS, TOKEN_BYTES = 128, 1024
"""Size of a block of the CPU's key-value cache, and of the tiny model's token in it."""


def test_preemptions_are_counted_and_change_no_response(tiny_model, tmp_path):
    """Eight responses start with one block each and soon need another."""
    cache_gib = 9 * BLOCK_TOKENS * TOKEN_BYTES / 2**30
    prompt = (7,) * (BLOCK_TOKENS - 8)
    seeds = [response_seeds(8, "small", key) for key in range(2)]
    crowd = [group_request(key, prompt, seeds[key]) for key in range(2)]
    few = [group_request(key, prompt, seeds[key][:2]) for key in range(2)]
    with running_engines(tiny_model, tmp_path, kv_cache_gib=cache_gib) as engines:
        crowded = ask(engines, crowd)
        (activity,) = engines.activity()
        assert activity.num_preemptions > 0 and activity.max_kv_use > 0.9
        alone = ask(engines, few)
        (activity,) = engines.activity()
        assert activity.num_preemptions == 0
    assert worst_error(Reference(tiny_model), crowd, crowded) < 1e-5
    for key, responses in alone.items():
        for before, after in zip(responses, crowded[key], strict=False):
            assert before.token_ids.tolist() == after.token_ids.tolist()
