"""The driver's side over real Ray actors: results, errors that keep their type, dead ranks."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megadapo.cluster.watch.heartbeat import read_heartbeat
from megadapo.errors import ConfigError, DataError, ProcessDiedError, ProcessHungError
from megadapo.trainer.trainer import Trainer, rank_environment
from megadapo.trainer.types import UpdateRequest
from tests.support.processes.running import wait_until
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.ranks import settings_for


def start(settings, log_folder: Path) -> Trainer:
    cluster: Any = SimpleNamespace(
        trainer_options=lambda rank: {"num_cpus": 0},
        trainer_cores=lambda: [1] * settings.trainer.num_ranks,
        uses_cuda=False,
    )
    return Trainer(settings, cluster, log_folder=log_folder)


def pid_of(trainer) -> int:
    return os.getpid()


def stop_the_second_in_an_update(trainer, path: Path) -> None:
    """Stop rank 1 from inside a forward pass: seen from outside, the update may be over."""
    import torch

    def stop(*_: object) -> None:
        heartbeat = read_heartbeat(path)
        if heartbeat is not None and heartbeat.doing == "update":
            os.kill(os.getpid(), signal.SIGSTOP)

    if torch.distributed.get_rank() == 1:
        trainer.chunks[0].register_forward_pre_hook(stop)


@pytest.mark.slow
def test_two_ranks_train_save_load_and_die(local_ray, models, tmp_path):
    """One life of a trainer; starting one costs seconds, so it is one test."""
    batch = random_batch(RAGGED, num_mini_batches=2, policy_version=4)
    group = start(settings_for(str(models / "qwen2-tied"), data=2), tmp_path / "logs")
    pids = group.call_all("apply", pid_of)

    first = group.update(UpdateRequest(batch=batch, policy_version=4, step=1))
    assert first.metrics["policy/ratio_first_max_error"] == 0.0
    assert first.metrics["tokens/trained"] == np.isfinite(batch.logprobs_rollout).sum()
    logprobs = group.logprobs(batch)
    assert (np.isfinite(logprobs) == np.isfinite(batch.logprobs_rollout)).all()
    assert sum(first.of_ranks["train/rank_tokens_{}"]) == len(batch.tokens)
    assert all(len(values) == 2 and min(values) > 0 for values in first.of_ranks.values())
    assert len(first.of_ranks) == 3
    assert first.recorded is None

    saved = tmp_path / "saved"
    saved.mkdir()
    begun = group.begin_save(saved)
    recorded = replace(batch, recorded=[3, 10])
    second = group.update(UpdateRequest(batch=recorded, policy_version=4, step=2))
    places = np.r_[batch.cu_seqlens[3] : batch.cu_seqlens[4]]
    places = np.r_[places, batch.cu_seqlens[10] : batch.cu_seqlens[11]]
    asked = logprobs[places]
    assert second.recorded is not None
    assert np.array_equal(second.recorded.old, asked[np.isfinite(asked)])
    files = begun()
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= files.keys()
    assert sum(file.bytes for file in files.values()) > group.checkpoint_bytes > 0
    group.load(saved, files)
    assert np.array_equal(group.logprobs(batch), logprobs, equal_nan=True)
    again = group.update(UpdateRequest(batch=batch, policy_version=4, step=2))
    assert again == second

    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ProcessDiedError, match="trainer rank 1 died .*trainer-rank-1.log"):
        group.update(UpdateRequest(batch=batch, policy_version=4, step=3))
    assert time.monotonic() - started < 30
    assert group.ranks == [], "the surviving rank waits for a dead one: it must be ended too"
    group.shutdown()
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        timeout_s=20,
        message="a rank outlived its group",
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "tensor", "error", "message"),
    [
        ("no/such/folder", 1, DataError, "model.path = '.*no/such/folder'"),
        ("qwen2-tied", 3, ConfigError, "trainer.tensor_parallel = 3 .*num_attention_heads = 4"),
    ],
    ids=["of one rank", "of every rank"],
)
def test_error_of_ranks_keeps_its_type(local_ray, models, tmp_path, model, tensor, error, message):
    """tests/unit/cluster/test_calls.py has the translation alone."""
    with pytest.raises(error, match=message):
        start(settings_for(models / model, tensor=tensor), tmp_path)


@pytest.mark.slow
def test_stopped_rank_is_named_within_the_deadline(local_ray, models, tmp_path):
    """Its silence alone tells; the other rank, which waits for it in a collective, is as late."""
    settings = settings_for(str(models / "qwen2-tied"), data=2)
    trainer = settings.trainer.model_copy(update={"timeout_s": 18.0})
    settings = replace(settings, trainer=trainer)
    group = start(settings, tmp_path)
    pids = group.call_all("apply", pid_of)
    group.call_all("apply", stop_the_second_in_an_update, tmp_path / "trainer-rank-1.heartbeat")
    began = time.monotonic()
    batch = random_batch(RAGGED * 4, num_mini_batches=8)
    with pytest.raises(ProcessHungError) as caught:
        for step in range(1, 200):
            group.update(UpdateRequest(batch=batch, policy_version=0, step=step))
    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert message.startswith("trainer rank 1 sent no heartbeat for 6 s in update")
    assert message.endswith(f"stacks: {tmp_path}/trainer-rank-1.log")
    wait_until_gone(pids)
    for rank in (0, 1):
        assert "update" in (tmp_path / f"trainer-rank-{rank}.log").read_text()


def test_rank_has_as_many_threads_as_its_share_of_the_cores():
    """More threads than cores make ranks wait for each other."""
    trainer = settings_for("x", tensor=2).trainer
    shared = rank_environment(trainer, uses_cuda=False, dtype="float32", num_cores=2)
    assert shared["OMP_NUM_THREADS"] == "2"
