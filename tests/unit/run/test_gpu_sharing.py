"""The order in which the trainer and the engines use the GPUs that they share."""

from typing import Any

import pytest

from megadapo.errors import CheckpointError
from megadapo.run.gpu_sharing import GpuSharing

AWAKE = ["engines.wake_weights", "engines.wake_cache"]
DONE = ["engines.on_update_done", "reserved.on_update_done"]
STARTED = ["engines.on_update_start", "reserved.on_update_start"]


class Calls:
    def __init__(self, name: str, seen: list[str], *, shares_gpus: bool = True) -> None:
        self._name, self._seen = name, seen
        self.shares_gpus = shares_gpus

    def __getattr__(self, method: str) -> Any:
        def call(**keys: object) -> None:
            given = [f"{key}={keys[key]}" for key in keys]
            self._seen.append(" ".join([f"{self._name}.{method}", *given]))

        return call


def gpu_sharing(seen: list[str], *, shares_gpus: bool = True, keeps_weights: bool = False) -> Any:
    trainer: Any = Calls("trainer", seen)
    engines: Any = Calls("engines", seen, shares_gpus=shares_gpus)
    reserved: Any = Calls("reserved", seen, shares_gpus=False)
    return GpuSharing(trainer, engines, reserved, keeps_weights=keeps_weights)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_engines_sleep_from_update_to_publish(keeps_weights):
    """The weights come before the trainer's memory is freed, the key-value cache after that."""
    seen: list[str] = []
    sharing = gpu_sharing(seen, keeps_weights=keeps_weights)
    sharing.start_update()
    with sharing.publishing():
        seen.append("publish")
    weights, cache = AWAKE
    published = [weights, "publish", "trainer.leave_to_engines", cache]
    slept = f"engines.sleep keep_weights={keeps_weights}"
    assert seen == [*STARTED, slept, *published, *DONE]


@pytest.mark.parametrize("shares_gpus", [True, False])
def test_engines_sleep_with_their_weights_while_a_save_begins(shares_gpus):
    seen: list[str] = []
    with gpu_sharing(seen, shares_gpus=shares_gpus).saving():
        seen.append("save")
    around = [*STARTED, "engines.sleep keep_weights=True", "save", *AWAKE, *DONE]
    assert seen == (around if shares_gpus else ["save"])


def test_engines_wake_after_a_save_that_fails():
    seen: list[str] = []
    with pytest.raises(CheckpointError), gpu_sharing(seen).saving():
        raise CheckpointError("disk full")
    assert seen[-4:] == [*AWAKE, *DONE]


def test_replay_has_no_engines_to_wait_for():
    seen: list[str] = []
    trainer: Any = Calls("trainer", seen)
    sharing = GpuSharing(trainer)
    sharing.start_update()
    with sharing.saving():
        seen.append("save")
    assert seen == ["save"]
