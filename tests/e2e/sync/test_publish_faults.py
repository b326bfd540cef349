"""Processes that stop, die or restart in the middle of a weight update."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from megadapo.errors import InfraError
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.publish import Publisher
from megadapo.weights.config import PUBLISHED_GROUP, WeightsConfig
from tests.support.models.tiny_models import make_engine_model
from tests.support.processes.running import wait_until
from tests.support.rollout.engine_checks import actor_pid, start_engines
from tests.support.weights.actors import greedy, start_actors, start_senders

DEADLINE_S = 20.0
CONFIG = WeightsConfig(bucket_mib=0.05, verify="off", deadline_s=DEADLINE_S)
VERIFYING = CONFIG.model_copy(update={"verify": "every"})

pytestmark = [
    pytest.mark.fault,
    pytest.mark.full,
    pytest.mark.usefixtures("local_ray"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_model(tmp_path_factory.mktemp("model"), seed=1)


def test_stopped_sender_is_named_and_engine_keeps_its_weights(folder, tmp_path):
    """No update waits forever; test_publish.py and test_sync_faults.py have later instants."""
    engines = start_engines(folder, tmp_path)
    senders = start_senders(folder, pp_size=2)
    publisher = Publisher(senders, engines, CONFIG, tensor_parallel=1, dtype=torch.float32)
    publisher.publish(1)
    before = greedy(engines)
    pid = ray.get(senders[1].pid.remote())
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(InfraError, match=r"bucket 0 of \d+: trainer rank 1 did not .* within"):
            publisher.publish(2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - started < 3 * DEADLINE_S
    assert engines.policy_version == 1
    after = greedy(engines)
    assert [tokens for tokens, _ in before[0]] == [tokens for tokens, _ in after[0]]
    publisher.publish(2)
    engines.shutdown()


def test_two_rank_engine_restarts_after_failed_update(folder, tmp_path):
    """An update does not count as done while a rank still reads it."""
    engines = start_engines(folder, tmp_path, tensor_parallel=2)
    senders = start_senders(folder)
    publisher = Publisher(senders, engines, CONFIG, tensor_parallel=2, dtype=torch.float32)
    publisher.publish(1)
    expected = greedy(engines)
    children = psutil.Process(actor_pid(engines, 0)).children(recursive=True)
    processes = [child for child in children if "VLLM" in " ".join(child.cmdline())]
    workers = [process for process in processes if "Worker" in " ".join(process.cmdline())]
    assert len(processes) >= 3 and len(workers) == 2

    ray.get(senders[0].signal_at.remote(1, signal.SIGKILL, workers[1].pid))
    publisher.publish(2)
    assert engines.updatable() == [] and engines.policy_version == 2
    (after,), (before,) = greedy(engines), expected
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]
    (note,) = engines.drain_warnings()
    assert "rollout engine 0" in note and "restart 1 of 3" in note
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert alive == []
    engines.shutdown()


def test_first_meeting_may_take_longer_than_a_bucket(folder, tmp_path):
    """A deadline that fits buckets would end the start of a run with hundreds of ranks."""
    engines = start_engines(folder, tmp_path)
    senders = start_senders(folder)
    ray.get(senders[0].meet_late.remote(DEADLINE_S + 2.0))
    Publisher(senders, engines, CONFIG, tensor_parallel=1, dtype=torch.float32).publish(1)
    assert engines.policy_version == 1
    engines.shutdown()


def test_restarted_engine_gets_published_weights_while_ranks_are_busy(folder, tmp_path):
    """It would wait for the end of the update, or get weights that belong to no version."""
    second = make_engine_model(tmp_path / "second", seed=2)
    engines = start_engines(folder, tmp_path)
    senders = start_senders(
        folder, start_actors(2, concurrency_groups={PUBLISHED_GROUP: 1}), tp_size=2
    )
    options = {"tensor_parallel": 1, "dtype": torch.float32}
    republisher = Publisher(senders, engines, VERIFYING, sender="published", **options)
    publisher = Publisher(senders, engines, VERIFYING, republisher=republisher, **options)
    publisher.publish(1)
    expected = greedy(engines)

    engines.on_update_start()
    ray.get([sender.load.remote(second) for sender in senders])
    working = [sender.work_until.remote(tmp_path / "done") for sender in senders]
    dead = engines.incarnation(0)
    os.kill(actor_pid(engines, 0), signal.SIGKILL)
    wait_until(lambda: engines.check() or engines.incarnation(0) != dead, timeout_s=60)
    dies_during_its_update(engines, senders[0])
    wait_until(lambda: engines.check() or engines.capacity, timeout_s=120)
    assert same(greedy(engines), expected)
    assert not ray.wait(working, timeout=0)[0], "the ranks are not busy any more"
    (tmp_path / "done").touch()
    ray.get(working)

    publisher.publish(2)
    assert engines.policy_version == 2 and not same(greedy(engines), expected)
    engines.shutdown()


def dies_during_its_update(engines: Engines, sender: Any) -> None:
    """Let an engine that restarts die in mid-update, which must cost no more than a restart."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with engines.publishing():
            is_held.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    wait_until(lambda: engines.check() or engines.updatable(), timeout_s=120)
    before, pid = engines.incarnation(0), actor_pid(engines, 0)
    beside = sender.signal_at.options(concurrency_group=PUBLISHED_GROUP)
    ray.get(beside.remote(1, signal.SIGKILL, pid))
    may_go.set()
    thread.join()
    wait_until(lambda: engines.check() or engines.incarnation(0) != before, timeout_s=60)


def same(left: list[Any], right: list[Any]) -> bool:
    """Return whether answers have the same tokens and log-probs, to the last bit."""
    pairs = zip(sum(left, []), sum(right, []), strict=True)
    return all(a == b and torch.equal(c, d) for (a, c), (b, d) in pairs)
