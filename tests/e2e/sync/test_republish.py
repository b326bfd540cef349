"""Engines that join or restart while the trainer changes its weights get the published ones."""

import os
import signal
import threading
from typing import Any

import pytest
import ray
import torch

from megadapo.rollout.pool.engines import Engines
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.peers import PUBLISHED_GROUP
from megadapo.weights.sync.publish import Publisher
from tests.support.models.tiny_models import make_engine_model
from tests.support.processes.running import wait_until
from tests.support.rollout.engine_checks import actor_pid, start_engines
from tests.support.weights.actors import greedy, start_actors, start_senders

CONFIG = WeightsConfig(bucket_mib=0.05, verify="every", deadline_s=20.0)

pytestmark = [
    pytest.mark.fault,
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.usefixtures("local_ray"),
]


def test_restarted_engine_gets_published_weights_while_ranks_are_busy(tmp_path):
    """It would wait for the end of the update, or get weights that belong to no version."""
    first, second = (make_engine_model(tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    engines = start_engines(first, tmp_path)
    senders = start_senders(
        first, start_actors(2, concurrency_groups={PUBLISHED_GROUP: 1}), tp_size=2
    )
    options = {"tensor_parallel": 1, "dtype": torch.float32}
    republisher = Publisher(senders, engines, CONFIG, sender="published_sender", **options)
    publisher = Publisher(senders, engines, CONFIG, republisher=republisher, **options)
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
