"""The start of a run's processes: engines, shared GPUs, and what counts as progress."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.cluster.calls import Watch
from megadapo.config import load_config
from megadapo.data.pretraining import PretrainingStream
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import DataError
from megadapo.rollout.pool.request import REQUEST_FILE, EngineRequest, write_request
from megadapo.run import processes
from megadapo.run.launch import _progress, with_present_data
from megadapo.run.processes import GpuSharing, at_start
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.step.training import PRETRAINING_STATE
from tests.support import REPOSITORY
from tests.support.runs.runs_alone import config_of

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
    monkeypatch.setattr(processes, "start_engines", lambda *args, **keys: engines)
    monkeypatch.setattr(
        processes,
        "Trainer",
        lambda settings, *args, **keys: (
            started.append(settings.shares_gpu) or SimpleNamespace(shutdown=None)
        ),
    )
    keys = f"cluster.device={device} cluster.placement={placement} rollout.num_engines=1"
    config = load_config(REPOSITORY / "configs" / "quickstart.toml", keys.split())
    phases: Any = SimpleNamespace(phase=lambda name: nullcontext())
    cluster: Any = None
    settings = processes.trainer_settings(config)
    processes.start_processes(*(config, settings, phases, cluster), ExitStack(), Watch())
    assert started == [shares]


@pytest.mark.parametrize(("wanted", "started"), [(None, 3), (1, 1), (3, 3), (8, 3)])
def test_start_needs_no_more_slots_than_the_recipe(tmp_path, wanted, started):
    """A run whose engines were removed with their nodes would wait for these nodes."""
    config = config_of(tmp_path, {"cluster.placement": "separate", "rollout.num_engines": 3})
    if wanted is not None:
        write_request(tmp_path, EngineRequest(num_engines=wanted))
    assert at_start(config, tmp_path).rollout.num_engines == started
    assert config.rollout.num_engines == 3


def test_damaged_or_useless_request_changes_nothing(tmp_path):
    config = config_of(tmp_path, {"rollout.num_engines": 3})
    write_request(tmp_path, EngineRequest(num_engines=1))
    assert at_start(config, tmp_path) == config
    (tmp_path / REQUEST_FILE).write_text("[")
    separate = config_of(tmp_path, {"cluster.placement": "separate", "rollout.num_engines": 3})
    assert at_start(separate, tmp_path) == separate


@pytest.mark.parametrize(
    ("pools", "tokens"),
    [((), 0), ((50, None), 50), ((50, 7), 57)],
    ids=["replay", "all", "reserved"],
)
def test_tokens_of_the_reserved_engine_are_progress(pools, tokens):
    """A run that waits for its evaluation alone would look stalled."""
    reports = []
    trainer = SimpleNamespace(num_micro_batches=3)
    engines = [pool and SimpleNamespace(num_tokens=pool) for pool in pools]
    status: Any = SimpleNamespace(report_progress=lambda *counts: reports.append(counts))
    _progress(status, trainer, *engines)()
    assert reports == [(3, tokens)]


def test_other_data_is_refused_or_begins_with_its_first_row(tmp_path):
    """A run with --accept-changes=data.train started everything, and then ended all the same."""
    prompts = [Prompt(str(i), (("user", f"{i}"),), "1", "test") for i in range(4)]
    stream, other = PromptStream(prompts, 0), PromptStream(prompts[:3], 0)
    sampler = {"cursor": {"next_index": 3, "prompts": stream.state_dict()}, "schedule": 5}
    checkpoint = Checkpoint(tmp_path, 2, {"sampler": sampler, PRETRAINING_STATE: {"place": 7}})
    same = with_present_data(checkpoint, stream, None)
    assert same.state == checkpoint.state
    texts = PretrainingStream(["text"], lambda text: [1, 2], seed=0, max_tokens=2)
    for data in ((other, None), (stream, texts), (None, texts)):
        with pytest.raises(DataError, match=r"--accept-changes=data\.train"):
            with_present_data(checkpoint, *data)
        state = with_present_data(replace(checkpoint, accepts_other_data=True), *data).state
        is_other = data[0] is other
        assert state["sampler"]["cursor"]["next_index"] == (0 if is_other else 3)
        assert (PRETRAINING_STATE in state) == is_other
