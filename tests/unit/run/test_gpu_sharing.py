"""The order in which the trainer and the engines use the GPUs that they share."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.cluster.calls import Watch
from megadapo.config import load_config
from megadapo.run import processes
from megadapo.run.processes import GpuSharing
from tests.support import REPOSITORY

STARTED = ["engines.on_update_start", "reserved.on_update_start"]
WAKE = ["engines.wake_weights", "trainer.leave_to_engines", "engines.wake_cache"]
DONE = ["engines.on_update_done", "reserved.on_update_done"]


class Calls:
    def __init__(self, name: str, seen: list[str], *, shares_gpus: bool = True) -> None:
        self._name, self._seen = name, seen
        self.shares_gpus = shares_gpus
        self.ranks = ["rank 0"]

    def __getattr__(self, method: str) -> Any:
        def call(**keys: object) -> None:
            given = [f"{key}={keys[key]}" for key in keys]
            self._seen.append(" ".join([f"{self._name}.{method}", *given]))

        return call


def gpu_sharing(seen: list[str], *, shares_gpus: bool = True, keeps_weights: bool = False) -> Any:
    trainer: Any = Calls("trainer", seen)
    engines: Any = Calls("engines", seen, shares_gpus=shares_gpus)
    reserved: Any = Calls("reserved", seen, shares_gpus=False)
    return trainer, GpuSharing(trainer, engines, reserved, keeps_weights=keeps_weights)


def slept(*, keep_weights: bool) -> list[str]:
    return [*STARTED, f"engines.sleep keep_weights={keep_weights}", "trainer.take_gpus"]


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_engines_sleep_from_update_to_publish(keeps_weights):
    """The weights come before the trainer's memory is freed, the key-value cache after that."""
    seen: list[str] = []
    _, sharing = gpu_sharing(seen, keeps_weights=keeps_weights)
    sharing.start_update()
    with sharing.publishing():
        seen.append("publish")
    weights, *rest = WAKE
    assert seen == [*slept(keep_weights=keeps_weights), weights, "publish", *rest, *DONE]


def test_trainer_with_its_own_gpus_never_leaves_them():
    seen: list[str] = []
    _, sharing = gpu_sharing(seen, shares_gpus=False)
    sharing.start_update()
    with sharing.publishing():
        pass
    assert not [call for call in seen if call.startswith("trainer.")]


def test_replay_has_no_engines_to_wait_for():
    seen: list[str] = []
    trainer: Any = Calls("trainer", seen)
    sharing = GpuSharing(trainer)
    sharing.start_update()
    assert seen == []


@pytest.mark.parametrize(
    ("device", "placement", "shares"),
    [("cuda", "colocated", True), ("cuda", "separate", False), ("cpu", "colocated", False)],
)
def test_ranks_know_whether_engines_use_their_gpu(monkeypatch, device, placement, shares):
    """Catches ranks that keep memory which their engines need, or free it for no engine."""
    started: list[bool] = []
    engines: Any = Calls("engines", [])
    monkeypatch.setattr(processes, "_start_engines", lambda *args, **keys: engines)
    monkeypatch.setattr(
        processes.Trainer,
        "start",
        lambda settings, *args, **keys: (
            started.append(settings.shares_gpu) or SimpleNamespace(shutdown=None)
        ),
    )
    changes = [f"cluster.device={device}", f"cluster.placement={placement}"]
    config = load_config(REPOSITORY / "configs" / "quickstart.toml", changes)
    phases: Any = SimpleNamespace(phase=lambda name: nullcontext())
    cluster: Any = None
    settings = processes.trainer_settings(config)
    processes.start_processes(*(config, settings, phases, cluster), ExitStack(), Watch())
    assert started == [shares]
