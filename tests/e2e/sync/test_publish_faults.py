"""Processes that stop or die in the middle of a weight update."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from megadapo.errors import InfraError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.rollout.engine_checks import actor_pid, start_engines
from tests.support.weights.actors import greedy, start_senders

DEADLINE_S = 20.0
CONFIG = WeightsConfig(bucket_mib=0.05, verify="off", deadline_s=DEADLINE_S)

pytestmark = [
    pytest.mark.fault,
    pytest.mark.full,
    pytest.mark.slow,
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
