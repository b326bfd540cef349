"""An update takes no more main memory than two buckets."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import CHECKSUM_CHUNK, checksum, max_bundle_bytes, pack
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.sender import WeightSender
from tests.support.models.tiny_models import make_model
from tests.support.processes.peak_memory import peak_growth
from tests.support.weights.connection import Live, rank_params, receiver_of
from tests.support.weights.ranks import run_ranks

LARGE_BUCKET = 8 << 20
NOISE = 2 << 20
"""Allowed growth besides the buckets: a quarter of one."""


def growth(update: Callable[[], object]) -> int:
    # pages of the program count as well when they are first used
    checksum(torch.ones(4 * CHECKSUM_CHUNK["cpu"]))
    return peak_growth(update)


def relay_and_measure(rank: int, folder: Path) -> None:
    """Relay half of the model from one node to the engine and three ranks on another."""
    layout = open_layout(folder)
    positions = replica_positions(layout, pp_size=4, stages=[(0, 1, 2), (3,), (4,), (5,)])
    plan = make_plan(
        layout, positions, EngineShape(nodes=("b",)), itemsize=4,
        max_bundle_bytes=max_bundle_bytes(LARGE_BUCKET), source_nodes=["a", "b", "b", "b"],
    )  # fmt: skip
    params = rank_params(folder, layout, positions[rank])
    sender = WeightSender(params, layout, positions[rank], rank)
    staged = sum(plan.bundle(one).num_bytes for one in plan.transfers if one.owner == 0)
    assert staged > 4 * LARGE_BUCKET

    # memory counts when it is first touched, which is in the first round
    sender.prepare(plan, bucket_bytes=LARGE_BUCKET, dtype=torch.float32, transport="shared_memory")
    sender.opened()

    def update() -> None:
        for number in range(pack(plan, LARGE_BUCKET).num_rounds):
            sender.fill(number, with_checksums=True)

    dist.barrier()
    grown = growth(update)
    assert grown <= 2 * LARGE_BUCKET + NOISE, f"rank {rank} grew by {grown} bytes"
    dist.barrier()


def send_and_measure(rank: int, folder: Path) -> None:
    """Send from three replicas to one engine rank at once."""
    layout = open_layout(folder)
    positions = replica_positions(layout, num_dp=3)
    engine = EngineShape(nodes=("",))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=max_bundle_bytes(LARGE_BUCKET)
    )
    sizes = {"bucket_bytes": LARGE_BUCKET, "dtype": torch.float32}
    schedule = pack(plan, LARGE_BUCKET)
    assert max(one.wave for _, one in schedule) > 0
    rounds = range(schedule.num_rounds)
    offers = [None] * 4
    if rank < 3:
        params = rank_params(folder, layout, positions[rank])
        sender = WeightSender(params, layout, positions[rank], rank)

        dist.all_gather_object(offers, sender.prepare(plan, **sizes, transport="nccl"))
        sender.connect(offers)

        def update() -> None:
            for number in rounds:
                sender.fill(number, with_checksums=True)
            dist.barrier()
    else:
        receiver = receiver_of(plan, layout, **sizes)
        assert schedule.capacity.waves[0, 0] > LARGE_BUCKET / 2
        target = Live(receiver.shapes)
        dist.all_gather_object(offers, None)
        inbox = receiver.open_inbox("nccl", offers, torch.device("cpu"))

        def update() -> None:
            receiver.start(target, inbox, with_checksums=True)
            for number in rounds:
                receiver.take(number)
            receiver.finish()
            dist.barrier()

    dist.barrier()
    grown = growth(update)
    assert grown <= 2 * LARGE_BUCKET + NOISE, f"rank {rank} grew by {grown} bytes"
    if rank == 3:
        target.compare(folder, layout, engine.position(0))
    dist.barrier()


@pytest.fixture
def large_model(tmp_path, monkeypatch) -> Path:
    """Return a model that is large compared with other allocations."""
    # freed tensors are returned to the system at once, so that none hides another
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    sizes = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "num_hidden_layers": 6}
    return make_model(tmp_path / "model", "Llama", **sizes)


@pytest.mark.full
def test_relay_to_three_senders_takes_two_buckets(large_model, tmp_path):
    run_ranks(relay_and_measure, 4, tmp_path, large_model, fresh=True)


@pytest.mark.full
def test_receiving_from_three_senders_takes_two_buckets(large_model, tmp_path):
    run_ranks(send_and_measure, 4, tmp_path, large_model, fresh=True)
