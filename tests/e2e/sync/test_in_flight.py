"""Publications to two real engines in mid-generation, full ones and deltas; an engine dies in some.

A token of other weights, a lost one or a doubled one would differ from the repetition, in which
every response stops at the tokens of the first time.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import RolloutEngine
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.pool.publish import Publisher, PublishReport
from megadapo.rollout.types import OpenGroup, SamplingSettings
from megadapo.weights.config import WeightsConfig
from tests.support.models.tiny_models import copy_model, make_engine_model
from tests.support.processes.running import wait_until
from tests.support.rollout.engine_checks import (
    Reference,
    actor_pid,
    all_finished,
    bits,
    make_requests,
)
from tests.support.rollout.engine_specs import engine_spec
from tests.support.weights.actors import start_senders

NUM_GROUPS = 60
"""Some groups still wait for a slot when a publication is prepared."""
MAX_RESPONSE_TOKENS = 120
NUM_SLOTS = 4
CONFIG = RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, max_num_seqs=NUM_SLOTS)
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_RESPONSE_TOKENS)
NUM_VERSIONS = 3
CHANGED = "model.layers.1.mlp.down_proj.weight"
"""The tensor in which versions differ; it is small enough for a delta."""
SMALL_BUCKETS = WeightsConfig(bucket_mib=0.05, verify="every", deadline_s=20.0)

pytestmark = [
    pytest.mark.fault,
    pytest.mark.full,
    pytest.mark.usefixtures("local_ray"),
]


class MortalEngine(RolloutEngine):
    """An engine that dies while it stops its groups, if a file beside its log asks for it.

    Its updates keep the prefix cache, so that only the cache's salt protects it: a continued
    response would otherwise read blocks of earlier weights.
    """

    async def reset_prefix_cache(self) -> None:
        """Keep all cached prefixes."""

    async def stop(self, *args: Any) -> Any:
        request = death_request(self._spec.log_file)
        if request.exists():
            request.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().stop(*args)


def death_request(log_file: Path) -> Path:
    return log_file.with_suffix(".dies")


@dataclass
class Pool:
    """Two engines and a trainer rank, whose weights follow the policy version."""

    engines: Engines
    sender: Any
    folders: list[Path]
    logs: list[Path]
    publisher: Publisher = field(init=False)

    def connect(self, config: WeightsConfig) -> None:
        self.publisher = Publisher(
            [self.sender],
            self.engines,
            config,
            tensor_parallel=1,
            dtype=torch.float32,
            deltas=config.mode == "delta",
        )

    def publish(self, **options: Any) -> PublishReport:
        version = self.engines.policy_version + 1
        # else an engine that restarts meanwhile gets the new weights with the old version
        self.engines.on_update_start()
        ray.get(self.sender.load.remote(self.folders[version % NUM_VERSIONS]))
        return self.publisher.publish(version, **options)

    def publish_in_flight(self, dies: str | None) -> tuple[PublishReport, list[OpenGroup]]:
        """Publish, and return the groups that were stopped for it."""
        stopped: list[OpenGroup] = []
        report = self.publish(stop_generating=lambda: stopped.extend(self.stop(dies)))
        return report, stopped

    def wait_for_all(self) -> None:
        """Wait until a lost engine has started again."""
        wait_until(
            lambda: self.engines.check() or len(self.engines.updatable()) == 2, timeout_s=120
        )

    def stop(self, dies: str | None) -> tuple[OpenGroup, ...]:
        """Stop all groups as a publication does; the first engine may die before, in or after."""
        if dies == "in":
            death_request(self.logs[0]).touch()
        if dies == "before":
            self._kill_first()
        unfinished = self.engines.stop(keep=True).unfinished
        if dies == "after":
            self._kill_first()
        return unfinished

    def _kill_first(self) -> None:
        process = psutil.Process(actor_pid(self.engines, 0))
        process.kill()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def pool(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("in-flight")
    base = make_engine_model(root / "base", seed=1)
    folders = []
    for number in range(NUM_VERSIONS):
        folders.append(root / f"model-{number}")
        folders[-1].mkdir()
        copy_model(base, folders[-1], lambda t, n=number: t[CHANGED].mul_(1.5 * n))
    logs = [root / f"engine-{index}.log" for index in range(2)]
    specs = [
        engine_spec(
            index=index,
            model=str(base),
            max_model_len=200 + MAX_RESPONSE_TOKENS,
            config=CONFIG,
            log_file=log,
        )
        for index, log in enumerate(logs)
    ]
    engines = Engines([EngineHandle(spec, {"num_cpus": 0}, MortalEngine) for spec in specs])
    engines.wait_until_ready()
    (sender,) = start_senders(folders[0])
    yield Pool(engines, sender, folders, logs)
    engines.shutdown()


@pytest.mark.parametrize(
    ("mode", "dies"),
    [
        *(("full", None), ("delta", None)),
        *(("full", "before"), ("delta", "in"), ("full", "after")),
    ],
)
def test_tokens_of_publications_in_flight_repeat(pool, mode, dies):
    pool.wait_for_all()
    pool.connect(SMALL_BUCKETS.model_copy(update={"mode": mode}))
    engines, first = pool.engines, pool.engines.policy_version + 1
    groups = [replace(group, settings=SETTINGS) for group in make_requests(NUM_GROUPS, 1)]
    submitted, stopped, finished = groups, [], []
    reports = [pool.publish()]
    for fault in (dies, None):
        engines.submit(submitted)
        # few, so that most responses are stopped
        while len(finished) < 2 * (1 + len(stopped)):
            finished += engines.finished()
        known = {one.key for one in finished}
        report, cut = pool.publish_in_flight(fault)
        reports.append(report)
        assert known | {one.key for one in cut} == {group.key for group in groups}
        submitted = cut
        stopped.append(cut)
    engines.submit(submitted)
    finished += all_finished(engines)

    num_running = sum(one.is_unfinished and one.num_tokens > 0 for one in stopped[0])
    num_reporting = 1 if dies in ("before", "in") else 2
    assert num_running <= num_reporting * NUM_SLOTS, "a dead engine has reported tokens"
    assert len(engines.drain_warnings()) == (dies is not None)
    assert reports[1].in_full == (mode == "full")
    # the connection of a lost engine has another base
    assert reports[2].in_full == (mode == "full" or dies is not None)
    assert all(report.pause_seconds < report.seconds for report in reports)
    check_log_probs(pool, finished, first)
    check_repetition(pool, groups, stopped, finished)


def check_log_probs(pool: Pool, finished: list[OpenGroup], first: int) -> None:
    """Each token has the log-prob of the weights of its version, and of no others."""
    folders = [pool.folders[(first + number) % NUM_VERSIONS] for number in range(NUM_VERSIONS)]
    references = [Reference(folder) for folder in folders]
    num_continued = 0
    for group in finished:
        (response,) = group.responses
        versions = response.policy_versions - first
        assert (np.diff(versions) >= 0).all()
        tokens = response.token_ids.tolist()
        table = np.stack([one.logprobs(group.prompt_ids, tokens) for one in references])
        places = np.arange(len(tokens))
        assert np.abs(response.logprobs - table[versions, places]).max() < 1e-5
        following = table[(versions + 1) % NUM_VERSIONS, places]
        num_continued += len(set(versions.tolist())) > 1
        assert len(tokens) < 5 or np.abs(response.logprobs - following).max() > 1e-3
    assert num_continued > 0, "no response was stopped by a publication"


def check_repetition(
    pool: Pool,
    groups: list[OpenGroup],
    stopped: list[list[OpenGroup]],
    finished: list[OpenGroup],
) -> None:
    """Generate everything again, on whichever engines there are, from the counts of each cut."""
    whole = bits({one.key: one.responses for one in finished})
    for cut in (*stopped, []):
        # a group without responses was lost before its engine reported a stop
        open_groups = {one.key: one for one in cut if one.is_unfinished or not one.responses}
        until = {key: (one.num_tokens,) for key, one in open_groups.items()}
        pool.publish()
        pool.engines.submit([replace(one, stop_at_tokens=until.get(one.key, ())) for one in groups])
        again = {one.key: one.responses for one in all_finished(pool.engines)}
        parts = {key: one.responses for key, one in open_groups.items() if one.responses}
        expected = bits(parts) | {key: whole[key] for key in again if key not in open_groups}
        assert {key: bits(again)[key] for key in expected} == expected
        groups = [replace(one, responses=again[one.key]) for one in groups if one.key in until]
    assert not groups
