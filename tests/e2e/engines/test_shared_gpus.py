"""Engines and trainer on the same GPUs: a walk over every path, in the memory of every recipe.

Engines are real processes without vLLM. They and the stand-in of the trainer write down what they
hold on the GPU; the sizes come from `megadapo plan`.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megadapo.config import load_config
from megadapo.plan.cards import GIB, H100
from megadapo.plan.phases import gpu_kinds, models_of
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineIncarnation
from megadapo.run.processes import GpuSharing
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until
from tests.support.processes.scripted_processes import (
    HoldingEngine,
    give_version,
    note,
    start_scripted_engines,
)
from tests.support.rollout.engine_checks import actor_pid

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.usefixtures("local_ray")]

RECIPES = [
    path.stem
    for path in sorted((REPOSITORY / "configs").glob("qwen*.toml"))
    if load_config(path).cluster.placement == "colocated"
]


class HoldingTrainer:
    """A stand-in of `Trainer` that holds what the ranks' Offload loads for each call."""

    def __init__(self, ledger: Path) -> None:
        self.ranks = ["rank 0"]
        self._note = lambda *held: note(ledger, "trainer", *held)
        self._may_load = True
        self._note("start")

    def update(self) -> None:
        assert self._may_load, "engines are awake"
        self._note("parameters", "gradients", "optimizer", "temporary")
        self._note("parameters")

    def save(self) -> None:
        self._note()

    def leave_to_engines(self) -> None:
        self._note()
        self._may_load = False

    def take_gpus(self) -> None:
        self._may_load = True


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    started = start_scripted_engines(
        1, tmp_path, gpus=("0",), actor_class=HoldingEngine, engine_progress_timeout_s=600.0
    )
    yield started
    started.shutdown()


def kill(engines: Engines, folder: Path) -> EngineIncarnation:
    """Kill the engine, and return which process it was."""
    pid, before = actor_pid(engines, 0), engines.incarnation(0)
    os.kill(pid, signal.SIGKILL)
    note(folder / "ledger", f"engine {pid}")
    return before


def wait_until_back(engines: Engines, before: EngineIncarnation) -> None:
    def serves_again() -> bool:
        engines.check()
        return engines.incarnation(0) != before and engines.capacity > 0

    wait_until(serves_again)


def publish(engines: Engines, sharing: GpuSharing, between: Callable[[], None] | None = None):
    with sharing.publishing():
        if between is not None:
            between()
        give_version(engines, engines.updatable(), engines.policy_version + 1)


def check_for(engines: Engines, seconds: float) -> None:
    """Watch over the engines for some time, as the trainer does while it works."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engines.check()
        time.sleep(0.05)


def walk(engines: Engines, folder: Path) -> None:
    """Go through every change of turns, with an engine lost before, in and after each."""
    engines.sleep()
    trainer: Any = HoldingTrainer(folder / "ledger")
    sharing = GpuSharing(trainer, engines)
    publish(engines, sharing)
    # lost in the rollout, and back in it
    wait_until_back(engines, kill(engines, folder))
    trainer.save()
    # lost at the end of a rollout: it starts while the trainer wants its GPU
    (folder / "slow").touch()
    before = kill(engines, folder)
    wait_until(lambda: engines.check() or engines.incarnation(0) != before)
    sharing.start_update()
    assert engines.updatable() == [0], "it was not waited for"
    trainer.update()
    (folder / "slow").unlink()
    publish(engines, sharing)
    # lost in an update
    sharing.start_update()
    before = kill(engines, folder)
    trainer.update()
    check_for(engines, 2.0)
    assert engines.incarnation(0) == before, "it started beside the trainer"
    publish(engines, sharing)
    wait_until_back(engines, before)
    # lost in the publish, with its weights awake
    sharing.start_update()
    trainer.update()
    before = engines.incarnation(0)
    publish(engines, sharing, between=lambda: kill(engines, folder))
    wait_until_back(engines, before)
    # lost in a save, and back in it
    before = kill(engines, folder)
    trainer.save()
    wait_until_back(engines, before)


def sizes(recipe: str) -> Iterator[tuple[dict[str, int], int]]:
    """Yield, for each kind of GPU, bytes by holding and the bytes that the trainer always has."""
    config = load_config(REPOSITORY / "configs" / f"{recipe}.toml")
    for kind in gpu_kinds(config, models_of(config), H100):
        phases = {phase.name: phase.items for phase in kind.phases}
        rollout, train = phases["rollout"], phases["train"]
        state = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}
        asleep = train["engine, asleep"]
        always = sum(size for name, size in rollout.items() if name in train)
        given = {kind: name for kind, name in state.items() if name not in rollout}
        yield (
            {
                "awake": sum(size for name, size in rollout.items() if name not in train),
                "asleep": asleep,
                "weights": asleep + rollout["engine weights"],
                "start": sum(phases["start trainer"].values()) - asleep,
                "temporary": sum(train.values())
                - always
                - asleep
                - sum(train[name] for name in given.values()),
                **{kind: train[given[kind]] if kind in given else 0 for kind in state},
            },
            always,
        )


def test_no_path_needs_more_than_the_card(engines, tmp_path):
    walk(engines, tmp_path)
    actions = [note.rpartition("; ")[2] for note in engines.drain_warnings()]
    free = "restarted when the trainer leaves its GPU"
    limit = "of 3 an hour"
    one, two, three = (f"restart {number} {limit}" for number in (1, 2, 3))
    assert actions == [one, two, free, free, three]
    ledger = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    for recipe in RECIPES:
        for held_bytes, always in sizes(recipe):
            holds: dict[str, int] = {}
            for who, *held in ledger:
                holds[who] = sum(held_bytes[name] for name in held)
                total = always + sum(holds.values())
                assert total < H100.memory_bytes, (recipe, holds, total / GIB)
