"""Evicted state comes back to the bit, gradients as zeros; meanwhile its memory is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from megadapo.algorithm.objective import PolicyObjective
from megadapo.errors import InfraError
from megadapo.trainer.config import StateKind
from megadapo.trainer.types import TrainerSettings, UpdateRequest
from tests.support.trainer.batches import random_batch
from tests.support.trainer.probes import build, save_at, state_bits, update
from tests.support.trainer.ranks import layout, layouts, settings_for, with_marks

if TYPE_CHECKING:
    from torch import Tensor

    from megadapo.trainer.rank import TrainerRank

KINDS: tuple[StateKind, ...] = get_args(StateKind)
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2, reference": layout("pp2") | {"objective": PolicyObjective(kl_coef=0.1)},
    **layouts("tp2-sp-bf16", "dp2-overlap", "vpp2-bf16"),
}
BATCH = random_batch([5, 21, 2, 13, 9, 30], num_mini_batches=2)


def offloading(settings: TrainerSettings, *offload: StateKind) -> TrainerSettings:
    trainer = settings.trainer.model_copy(update={"offload": offload})
    return replace(settings, trainer=trainer)


def held(rank: TrainerRank) -> dict[str, int]:
    """Bytes of each kind that its models have on the device."""
    models = [rank] if rank.critic is None else [rank, rank.critic]
    chunks = [chunk for model in models for chunk in model.chunks]
    buffers = [one for chunk in chunks for one in chunk.buffers + chunk.expert_parallel_buffers]
    parts = [part for model in models for part in model.optimizer.chained_optimizers]
    states = [state for part in parts for state in part.optimizer.state.values()]
    groups = [group for part in parts for group in part.optimizer.param_groups]
    masters = [] if rank.config.params_dtype.itemsize == 4 else groups
    return {
        "parameters": _num_bytes(one for chunk in chunks for one in chunk.parameters()),
        "gradients": _num_bytes(buffer.grad_data for buffer in buffers),
        "optimizer": _num_bytes(state[name] for state in states for name in state if name != "step")
        + _num_bytes(master for group in masters for master in group["params"]),
    }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def steps(rendezvous, settings: TrainerSettings, folder: Path) -> dict[str, Any]:
    """Three steps with engines' turns between them, a save and a load; what came of them."""
    from megadapo.weights.host_memory import HostMemory

    rank = build(rendezvous, settings)
    if settings.trainer.offload:
        # as on a GPU, but for the pinning
        rank.writer._memory = HostMemory(pinned=False)
    sizes = {"built": held(rank)}
    results = [update(rank, BATCH, policy_version=0, step=1)]
    sizes["updated"] = held(rank)
    sums = [rank.weight_senders["live"].fingerprint(), sent(rank)]
    rank.leave_to_engines()
    sizes["left"] = held(rank)
    # an engine that is started again while others generate
    sums += [rank.weight_senders["live"].fingerprint(), sent(rank)]
    refused = refused_calls(rank, folder)
    sizes["refused"] = held(rank)
    # beside engines that generate
    files = [save_at(rank, folder / "saved")]
    sizes["saved"] = held(rank)
    rank.take_gpu()
    logprobs = rank.logprobs(BATCH)
    results.append(update(rank, BATCH, policy_version=0, step=2))
    rank.load(folder / "saved")
    results.append(update(rank, BATCH, policy_version=0, step=2))
    rank.leave_to_engines()
    rank.take_gpu()
    files.append(save_at(rank, folder / "again"))
    rank.offload.load(*KINDS)
    sizes["brought"] = held(rank)
    zeros = all(
        not buffer.grad_data.any()
        for chunk in rank.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    )
    return {
        "bits": state_bits(rank),
        "files": files,
        "results": results,
        "logprobs": None if logprobs is None else logprobs.tobytes(),
        "sums": sums,
        "sizes": sizes,
        "zeros": zeros,
        "refused": refused,
    }


def refused_calls(rank: TrainerRank, folder: Path) -> list[str]:
    """Names of the calls that are refused while engines use the rank's GPU."""
    request = UpdateRequest(batch=BATCH, policy_version=0, step=2)
    calls: dict[str, Callable[[], object]] = {
        "update": partial(rank.update, request),
        "logprobs": partial(rank.logprobs, BATCH),
        "load": partial(rank.load, folder),
    }
    refused = []
    for name, call in calls.items():
        try:
            call()
        except InfraError:
            refused.append(name)
    return refused


def sent(rank: TrainerRank) -> list[int]:
    """Checksums of what an update puts into this rank's buckets."""
    import torch.distributed as dist

    from megadapo.weights.sync.buckets import pack
    from megadapo.weights.sync.plan import EngineShape
    from megadapo.weights.sync.planning import make_plan

    positions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(positions, rank.position)
    dtype, size = rank.config.params_dtype, 1 << 14
    engine = EngineShape(tp_size=1, nodes=("",))
    plan = make_plan(rank.layout, positions, engine, itemsize=dtype.itemsize, max_bundle_bytes=size)
    sender = rank.weight_senders["live"]
    sender.prepare(plan, bucket_bytes=size, dtype=dtype, transport="shared_memory")
    rounds = range(pack(plan, size).num_rounds)
    return [one for number in rounds for one in sender.fill(number, with_checksums=True)]


@pytest.mark.parametrize(
    "name", with_marks(["pp2, reference"], slow=("tp2-sp-bf16", "dp2-overlap"), full=["vpp2-bf16"])
)
def test_offload_changes_no_bit_and_frees_memory(ranks, models, tmp_path, name):
    settings = settings_for(models / "deep-tied", **LAYOUTS[name])
    stayed = ranks.run(2, steps, settings, tmp_path / "stayed")
    moved = ranks.run(2, steps, offloading(settings, *KINDS), tmp_path / "moved")
    for before, after in zip(stayed, moved, strict=True):
        sizes, free = before.pop("sizes"), after.pop("sizes")
        assert after["refused"] == ["update", "logprobs", "load"]
        whole = sizes["built"]
        assert all(whole.values()) and all(size == whole for size in sizes.values())
        only = dict.fromkeys(KINDS, 0) | {"parameters": whole["parameters"]}
        assert free["built"] == free["updated"] == only
        assert free["left"] == free["refused"] == free["saved"] == dict.fromkeys(KINDS, 0)
        assert free["brought"] == whole
        assert not before.pop("zeros") and after.pop("zeros")
        assert before == after
        fingerprint, slices, fingerprint_away, slices_away = after["sums"]
        assert (fingerprint, slices) == (fingerprint_away, slices_away) and slices


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_leaves_alone(ranks, models, tmp_path, kind):
    settings = settings_for(models / "deep-tied", critic={})
    (found,) = ranks.run(1, steps, offloading(settings, kind), tmp_path)
    assert {name for name, size in found["sizes"]["left"].items() if size == 0} == {kind}
    assert found["sizes"]["brought"] == found["sizes"]["left"] | {
        kind: found["sizes"]["brought"][kind]
    }
