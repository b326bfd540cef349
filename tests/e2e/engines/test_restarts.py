"""One of three vLLM engines is killed or stopped: it restarts, and every response is the same.

With two engines, a restart that ends the other one as well could stay unnoticed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import ray
import torch

from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.types import GroupRequest, SamplingSettings
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import (
    actor_pid,
    all_finished,
    bits,
    make_requests,
    vllm_process,
)
from tests.support.weights.actors import (
    greedy,
    ray_on_this_machine,
    start_engines,
    start_senders,
)

PROGRESS_TIMEOUT_S = 20.0
DEADLINE_S = 25.0
LIMIT = 40
CONFIG = WeightsConfig(bucket_mib=0.05, verify="every", deadline_s=DEADLINE_S)

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    yield from ray_on_this_machine()


class Started(NamedTuple):
    engines: Engines
    publisher: Publisher
    senders: list
    folders: list[Path]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Three engines with the weights of the first of two models."""
    root = tmp_path_factory.mktemp("engines")
    folders = [make_engine_model(root / f"model-{seed}", seed=seed) for seed in (1, 2)]
    engines = start_engines(
        folders[0],
        root,
        num_engines=3,
        max_response_tokens=LIMIT,
        engine_progress_timeout_s=PROGRESS_TIMEOUT_S,
        max_engine_restarts=9,
    )
    senders = start_senders(folders[0], pp_size=2)
    publisher = Publisher(senders, engines, CONFIG, tensor_parallel=1, dtype=torch.float32)
    publisher.publish(1)
    yield Started(engines, publisher, senders, folders)
    engines.shutdown()


def requests(temperature: float = 1.0) -> list[GroupRequest]:
    settings = SamplingSettings(temperature=temperature, top_p=1.0, max_tokens=LIMIT)
    return [replace(group, settings=settings) for group in make_requests(36, 4)]


def answers(engines: Engines, groups: list[GroupRequest]) -> dict:
    engines.submit(groups)
    return bits({one.key: one.responses for one in all_finished(engines)})


def disturbed(engines: Engines, groups: list[GroupRequest], process: psutil.Process, how: int):
    """Return the responses if a process gets a signal after the first groups."""
    engines.submit(groups)
    early = engines.finished()
    process.send_signal(how)
    late = list(all_finished(engines))
    return bits({one.key: one.responses for one in [*early, *late]})


def wait_for_all(engines: Engines) -> None:
    """Send small requests until every engine serves."""
    deadline = time.monotonic() + 300
    slots = 3 * 10
    while engines.capacity < slots:
        assert time.monotonic() < deadline, "a dead engine did not restart"
        answers(engines, requests()[:3])


def assert_all_agree(engines: Engines) -> None:
    """Check that all engines have the same weights, by their greedy responses."""
    first, *others = greedy(engines)
    for other in others:
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in first]
        for (_, logprobs), (_, expected) in zip(other, first, strict=True):
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=0)


def test_killed_engine_restarts_and_the_batch_is_the_same(started):
    engines = started.engines
    expected = answers(engines, requests())
    places = [engines.incarnation(index) for index in range(3)]
    process = vllm_process(engines, 1, "EngineCore")
    assert disturbed(engines, requests(), process, signal.SIGKILL) == expected
    wait_for_all(engines)
    assert [engines.incarnation(index) for index in (0, 2)] == [places[0], places[2]]
    assert engines.incarnation(1) != places[1]
    (note,) = engines.drain_warnings()
    assert note.startswith("rollout engine 1 ") and "restart 1 of 9" in note
    assert_all_agree(engines)
    # the next update reaches all of them
    started.publisher.publish(2)
    assert answers(engines, requests()) == expected
    assert len(engines.activity()) == 3


@pytest.mark.parametrize("whom", ["actor", "EngineCore"])
def test_hung_engine_is_found_by_its_silence(started, whom):
    """Any of its processes may hang. Responses are greedy, as evaluations may request them."""
    engines = started.engines
    groups = requests(temperature=0.0)
    expected = answers(engines, groups)
    process = (
        psutil.Process(actor_pid(engines, 2)) if whom == "actor" else vllm_process(engines, 2, whom)
    )
    family = [process, *process.children(recursive=True)]
    assert disturbed(engines, groups, process, signal.SIGSTOP) == expected
    (note,) = engines.drain_warnings()
    assert note.startswith("rollout engine 2 has work and gave no token")
    wait_for_all(engines)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert_all_agree(engines)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_engine_that_dies_in_an_update_gets_it_again(started, how):
    """It dies at bucket 3; the other engines keep their update."""
    engines, publisher, senders, folders = started
    engines.drain_warnings()
    ray.get([sender.load.remote(folders[1]) for sender in senders])
    publisher.publish(10)
    expected = answers(engines, requests())
    ray.get([sender.load.remote(folders[0]) for sender in senders])
    publisher.publish(11)
    assert answers(engines, requests()) != expected

    ray.get([sender.load.remote(folders[1]) for sender in senders])
    places = [engines.incarnation(index) for index in range(3)]
    pid = vllm_process(engines, 0, "EngineCore").pid
    ray.get(senders[0].signal_at.remote(3, how, pid))
    engines.on_update_start()
    publisher.publish(12)
    assert engines.policy_version == 12
    assert answers(engines, requests()) == expected
    wait_for_all(engines)
    assert [engines.incarnation(i) == places[i] for i in range(3)] == [False, True, True]
    (note,) = engines.drain_warnings()
    # bucket 3 is filled while the engines take bucket 2
    assert "rollout engine 0" in note and (how == signal.SIGKILL or "bucket 2 of" in note)
    assert_all_agree(engines)
    assert answers(engines, requests()) == expected


def test_engine_that_dies_during_training_waits_for_weights(started):
    """The trainer's weights in mid-step belong to no version and must not be published."""
    engines, publisher, senders, folders = started
    engines.drain_warnings()
    ray.get([sender.load.remote(folders[0]) for sender in senders])
    publisher.publish(20)
    expected = answers(engines, requests())
    engines.on_update_start()
    ray.get([sender.load.remote(folders[1]) for sender in senders])
    vllm_process(engines, 1, "EngineCore").kill()
    deadline = time.monotonic() + 200
    while 1 in engines.updatable() and not engines.drain_warnings():
        assert time.monotonic() < deadline, "the death was not seen"
        engines.check()
        time.sleep(0.2)
    # the others still have the weights that they were given
    assert answers(engines, requests()) == expected
    while 1 not in engines.updatable():
        assert time.monotonic() < deadline, "the engine did not start"
        engines.check()
        time.sleep(0.2)
    assert answers(engines, requests()) == expected
    publisher.publish(21)
    assert answers(engines, requests()) != expected
    assert_all_agree(engines)
