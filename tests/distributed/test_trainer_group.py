"""The driver's side over real Ray actors: results, errors that keep their type, dead ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import ConfigError, DataError, InfraError
from megadapo.trainer.trainer import Trainer, rank_environment
from tests.support.batches import RAGGED, random_batch
from tests.support.ranks import expected_megatron, megatron_version, settings_for


@pytest.fixture(scope="module")
def ray_started() -> Iterator[None]:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


def start(settings) -> Trainer:
    options = [{"num_cpus": 0}] * settings.trainer.num_ranks
    return Trainer.start_ranks(settings, options, uses_cuda=False)


def pid_of(trainer) -> int:
    return os.getpid()


def version_in(trainer) -> str:
    return megatron_version()


def test_two_ranks_train_save_load_and_die(ray_started: None, models: Path, tmp_path: Path) -> None:
    """One life of a trainer; starting one costs seconds, so it is one test."""
    batch = random_batch(RAGGED, num_mini_batches=2, policy_version=4)
    group = start(settings_for(str(models / "qwen2-tied"), data=2))
    pids = group.call_all("apply", pid_of)
    assert group.call_all("apply", version_in) == [expected_megatron()] * 2

    first = group.update(batch, policy_version=4, step=1)
    assert first.ratio_first_max_error == 0.0
    assert first.tokens_trained == np.isfinite(batch.logprobs_rollout).sum()
    logprobs = group.logprobs(batch)
    assert (np.isfinite(logprobs) == np.isfinite(batch.logprobs_rollout)).all()
    assert sum(share.num_tokens for share in first.shares) == len(batch.tokens)
    assert all(share.logprobs_seconds > 0 for share in first.shares)
    assert first.recorded is None

    begun = group.begin_save(tmp_path)
    second = group.update(batch, policy_version=4, step=2, record=[3, 10])
    places = np.r_[batch.cu_seqlens[3] : batch.cu_seqlens[4]]
    places = np.r_[places, batch.cu_seqlens[10] : batch.cu_seqlens[11]]
    asked = logprobs[places]
    assert second.recorded is not None
    assert np.array_equal(second.recorded.old, asked[np.isfinite(asked)])
    files = begun()
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= files.keys()
    assert sum(file.bytes for file in files.values()) > group.checkpoint_bytes() > 0
    group.load(tmp_path, files)
    assert np.array_equal(group.logprobs(batch), logprobs, equal_nan=True)
    assert replace(group.update(batch, policy_version=4, step=2), lr=second.lr) == second

    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(InfraError, match="trainer rank 1"):
        group.update(batch, policy_version=4, step=3)
    assert time.monotonic() - started < 30
    assert group.ranks == [], "the surviving rank waits for a dead one: it must be ended too"
    group.shutdown()
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its group"
        time.sleep(0.1)


def test_errors_of_a_rank_keep_their_type_and_message(ray_started: None) -> None:
    with pytest.raises(DataError, match="model.path = 'no/such/folder'"):
        start(settings_for("no/such/folder"))


@pytest.mark.full
def test_an_error_of_every_rank_is_one(ray_started: None, models: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.tensor_parallel = 3 .*num_attention_heads = 4"):
        start(settings_for(str(models / "qwen2-tied"), tensor=3))


def test_a_stopped_rank_is_reported_within_the_deadline(ray_started: None, models: Path) -> None:
    """SIGKILL closes sockets; a process that merely stands still is found by the clock alone."""
    settings = settings_for(str(models / "qwen2-tied"))
    settings = replace(settings, trainer=settings.trainer.model_copy(update={"timeout_s": 4.0}))
    group = start(settings)
    (pid,) = group.call_all("apply", pid_of)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(InfraError, match="trainer rank 0 did not finish update within 4 s"):
        group.update(random_batch([9, 9]), policy_version=0, step=1)
    wait_until_gone([pid])


def test_threads_are_shared_out_unless_given() -> None:
    """More threads than cores make ranks wait for each other."""
    trainer = settings_for("x", tensor=2).trainer
    shared = rank_environment(trainer, uses_cuda=False, dtype="float32", num_cores=2)
    assert shared["OMP_NUM_THREADS"] == "2"
    three = trainer.model_copy(update={"num_threads": 3})
    given = rank_environment(three, uses_cuda=False, dtype="float32", num_cores=2)
    assert given["OMP_NUM_THREADS"] == "3"
