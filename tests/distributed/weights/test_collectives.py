"""Collective work of trainer ranks: relaying slices between nodes, and messages to engines."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import pack
from megadapo.weights.sync.delta import combine
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.planning import Hosts, make_plan
from megadapo.weights.sync.sender import WeightSender
from tests.support.models.tiny_models import make_model
from tests.support.weights.connection import BUCKET, Shards, rank_params, receiver_of
from tests.support.weights.message_order import Message, stuck_ranks
from tests.support.weights.ranks import run_ranks


def relay_and_compare(rank: int, folder: Path, engine: EngineShape, places: list[str]) -> None:
    """Update engines on the second of two nodes; half of the model is on the first."""
    layout = open_layout(folder)
    positions = replica_positions(layout, tp_size=2, pp_size=2)
    hosts = Hosts(["a", "a", "b", "b"], ["b"] * len(engine.nodes))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=BUCKET, source_nodes=places,
        hosts=hosts,
    )  # fmt: skip
    assert any(one.is_forwarded for one in plan.transfers) == (len(engine.nodes) > 1)
    params = rank_params(folder, layout, positions[rank])
    sender = WeightSender(params, layout, positions[rank], rank)
    entered = record_batches()
    offer = sender.prepare(
        plan, bucket_bytes=BUCKET, dtype=torch.float32, transport="shared_memory", deltas=True
    )
    offers = [None] * 4
    dist.all_gather_object(offers, offer)
    # one engine of two ranks, or two of one
    place = divmod(rank - 2, engine.num_ranks)
    receiver, inbox, target = None, None, Shards()
    if rank >= 2:
        receiver = receiver_of(plan, layout, receiver=place[0], engine_rank=place[1])
        inbox = receiver.open_inbox("shared_memory", offers, torch.device("cpu"))
    dist.barrier()
    sender.opened()
    sender.begin(None)
    relay_rounds(sender, receiver, inbox, target, pack(plan, BUCKET), version=1)
    if receiver is not None:
        target.compare(folder, layout, engine.position(place[1]))
    for param in params.values():
        param.view(-1)[::50] += 1.0
    encoded = [None] * 4
    mine = sender.encode(base=1, version=2, max_share=0.9, with_checksums=True)
    dist.all_gather_object(encoded, mine)
    delta = combine(plan, encoded, base=1)
    assert sum(delta.sizes) < 0.5 * plan.num_bytes
    sender.begin(delta.sizes)
    schedule = pack(plan, BUCKET).repack(delta.sizes)
    target.old, target.done = target.done, {}
    relay_rounds(sender, receiver, inbox, target, schedule, version=2, delta=delta)
    batches = [None] * 4
    dist.all_gather_object(batches, entered)
    assert all(batches) and stuck_ranks(dict(enumerate(batches))) == {}
    batches[rank] = batches[rank][:-1]
    assert stuck_ranks(dict(enumerate(batches))) != {}


def record_batches() -> list[list[Message]]:
    """Record the messages of every batch that this process enters."""
    issue, batches = dist.batch_isend_irecv, []

    def record(operations):
        batches.append([(one.peer, one.op is dist.isend, one.tensor.nbytes) for one in operations])
        return issue(operations)

    dist.batch_isend_irecv = record
    return batches


def relay_rounds(sender, receiver, inbox, target, schedule, *, version, delta=None) -> None:
    """Run one update; a delta's checksums are compared."""
    if receiver is not None:
        receiver.start(target, inbox, with_checksums=False, version=version, delta=delta)
    for number in range(schedule.num_rounds):
        sender.fill(number)
        dist.barrier()
        if receiver is not None:
            receiver.take(number)
        dist.barrier()
    if receiver is not None:
        receiver.finish()


def send_and_compare(rank: int, folder: Path, engine: EngineShape) -> None:
    """Update an engine of two ranks, or two engines of one, by messages of two trainer ranks."""
    layout = open_layout(folder)
    positions = replica_positions(layout, pp_size=2)
    plan = make_plan(layout, positions, engine, itemsize=4, max_bundle_bytes=BUCKET)
    rounds = range(pack(plan, BUCKET).num_rounds)
    offers = [None] * 4
    if rank < 2:
        position = positions[rank]
        params = rank_params(folder, layout, position)
        sender = WeightSender(params, layout, position, rank)
        offer = sender.prepare(plan, bucket_bytes=BUCKET, dtype=torch.float32, transport="nccl")
        dist.all_gather_object(offers, offer)
        sender.connect(offers)
        sent = count_sent(sender._outbox)
        for _ in range(2):
            for number in rounds:
                sender.fill(number)
            dist.barrier()
        # each update sends once for all engines of the node
        planned = [plan.bundle(one).num_bytes for one in plan.transfers if one.sender == rank]
        assert sum(sent) == 2 * sum(planned)
        return
    dist.all_gather_object(offers, None)
    place = (rank - 2, 0) if engine.num_ranks == 2 else (0, rank - 2)
    position = engine.position(place[0])
    receiver = receiver_of(plan, layout, engine_rank=place[0])
    inbox = receiver.open_inbox("nccl", offers, torch.device("cpu"), member=place[1])
    for _ in range(2):
        target = Shards()
        receiver.start(target, inbox, with_checksums=False)
        for number in rounds:
            receiver.take(number)
        receiver.finish()
        target.compare(folder, layout, position)
        dist.barrier()


def count_sent(outbox) -> list[int]:
    """Record the bytes of every message that an outbox sends."""
    group, sent = outbox._group, []

    class Counting:
        def send(self, tensors, peer, tag):
            sent.extend(one.nbytes for one in tensors)
            return group.send(tensors, peer, tag)

    outbox._group = Counting()
    return sent


@pytest.mark.parametrize("engine", [
    EngineShape(tp_size=2), EngineShape(engines_per_receiver=(2,)),
], ids=["two ranks", "two engines of a node"])  # fmt: skip
def test_messages_reach_separate_devices_in_plan_order(tmp_path, engine):
    run_ranks(send_and_compare, 4, tmp_path, make_model(tmp_path / "model", "Qwen2"), engine)


@pytest.mark.parametrize("engine,places", [
    (EngineShape(tp_size=2, nodes=("b",)), ["a", "a", "b", "b"]),
    (EngineShape(nodes=("engine 0", "engine 1")), ["", "", "engine 0", "engine 1"]),
], ids=["one engine", "two engines"])  # fmt: skip
def test_slices_of_other_node_reach_engine_through_relay(tmp_path, engine, places):
    folder = make_model(tmp_path / "model", "Qwen2")
    run_ranks(relay_and_compare, 4, tmp_path, folder, engine, places)
