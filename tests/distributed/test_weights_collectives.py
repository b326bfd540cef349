"""What trainer ranks do together: gathering full tensors, and relaying slices between nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.gather import ProcessGroups, gather_weights
from megadapo.weights.disk.load import import_weights
from megadapo.weights.disk.megatron_folder import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import (
    CHECKSUM_CHUNK,
    checksum,
    num_rounds,
    pack,
    piece_bytes,
    repack,
    room_of,
)
from megadapo.weights.sync.plan import EngineShape, plan_bytes
from megadapo.weights.sync.planning import Hosts, make_plan
from megadapo.weights.sync.receiver import WeightReceiver
from megadapo.weights.sync.sender import WeightSender
from megadapo.weights.sync.sent import delta_of
from megadapo.weights.sync.shared_memory import SharedMemoryInbox
from megadapo.weights.sync.transports import open_inbox
from tests.support.forked import run_processes
from tests.support.message_order import Message, stuck_ranks
from tests.support.tiny_models import make_model

BUCKET = 4096
LARGE_BUCKET = 8 << 20
NOISE = 2 << 20
"""What a process may grow by beside the buckets: a quarter of one."""


def run_ranks(
    function, world_size: int, tmp_path: Path, *args: object, fresh: bool = False
) -> None:
    """Run `function(rank, *args)` in processes of one Gloo group."""
    meeting = tmp_path / "meeting"
    meeting.unlink(missing_ok=True)
    run_processes(_joined, (world_size, meeting, function, args), world_size, fresh=fresh)


def _joined(rank: int, world_size: int, meeting: Path, function, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    function(rank, *args)
    dist.destroy_process_group()


def rank_params(folder, layout, position):
    params = {shard.name: torch.empty(shard.shape) for shard in layout.megatron_shards(position)}
    import_weights(folder, params, layout, position)
    return params


def groups_by(rank: int, positions, *same: str):
    """The group of ranks that agree with this one on everything but one axis."""
    keys = [tuple(getattr(position, name) for name in same) for position in positions]
    mine = None
    for key in dict.fromkeys(keys):
        ranks = [other for other, its in enumerate(keys) if its == key]
        group = dist.new_group(ranks)
        mine = group if keys[rank] == key else mine
    return mine


def gather_and_compare(rank: int, folder: Path, sizes: dict, exported: Path) -> None:
    layout = open_layout(folder)
    positions = replica_positions(layout, **sizes)
    position = positions[rank]
    groups = ProcessGroups(
        tp=groups_by(rank, positions, "pp_rank", "ep_rank"),
        pp=groups_by(rank, positions, "tp_rank", "ep_rank"),
        ep=groups_by(rank, positions, "pp_rank", "tp_rank"),
    )
    params = rank_params(folder, layout, position)
    expected = load_file(folder / "model.safetensors")
    seen = []
    for name, tensor in gather_weights(params, layout, position, groups):
        assert torch.equal(tensor, expected[name]), name
        seen.append(name)
    assert sorted(seen) == sorted(expected)
    tensors = gather_weights(params, layout, position, groups)
    if rank == 0:
        export_weights(
            tensors, exported, layout=layout, dtype=torch.float32, base_folder=folder,
            max_file_bytes=20_000,
        )  # fmt: skip
    else:
        list(tensors)
    dist.barrier()


CASES = [
    ("Qwen2", {"tie_word_embeddings": True}, {"tp_size": 2, "pp_size": 2}),
    ("Qwen3", {}, {"tp_size": 4}),
    ("Qwen3Moe", {}, {"tp_size": 2, "ep_size": 2, "num_dp": 2}),
    ("Qwen3Moe", {}, {"pp_size": 2, "vpp_size": 2, "ep_size": 2, "num_dp": 2}),
]


def gather_all(rank: int, folders: list[Path]) -> None:
    for folder, (_, _, sizes) in zip(folders, CASES, strict=True):
        gather_and_compare(rank, folder, sizes, folder.with_name(folder.name + "-exported"))


def test_ranks_gather_and_export_what_was_imported(tmp_path):
    """Catches ranks that are out of step, and a tensor put together from the wrong ranks."""
    folders = [
        make_model(tmp_path / str(number), family, **changes)
        for number, (family, changes, _) in enumerate(CASES)
    ]
    run_ranks(gather_all, 4, tmp_path, folders)
    for folder in folders:
        files = sorted(folder.with_name(folder.name + "-exported").glob("*.safetensors"))
        assert len(files) > 2 and all(path.stat().st_size < 40_000 for path in files)
        after = {name: one for path in files for name, one in load_file(path).items()}
        before = load_file(folder / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def relay_and_compare(rank: int, folder: Path, engine: EngineShape, places: list[str]) -> None:
    """Two nodes of two ranks; engines on the second node, and half of the model on the first."""
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
    receiver, inbox, target = None, None, Kept()
    if rank >= 2:
        inbox = SharedMemoryInbox(offers)
        receiver = WeightReceiver(
            plan, layout.engine_shards(engine.position(place[1])), engine=place[0],
            engine_rank=place[1], bucket_bytes=BUCKET, dtype=torch.float32,
        )  # fmt: skip
    sender.begin(None)
    relay_rounds(sender, receiver, inbox, target, pack(plan, BUCKET), version=1)
    if receiver is not None:
        target.compare(folder, layout, engine.position(place[1]))
    for param in params.values():
        param.view(-1)[::50] += 1.0
    encoded = [None] * 4
    mine = sender.encode(base=1, version=2, max_share=0.9, with_checksums=True)
    dist.all_gather_object(encoded, mine)
    delta = delta_of(plan, encoded, base=1)
    assert sum(delta.sizes) < 0.5 * plan_bytes(plan)
    sender.begin(delta.sizes)
    schedule = repack(plan, room_of(plan, pack(plan, BUCKET)), delta.sizes)
    target.old, target.done = target.done, {}
    relay_rounds(sender, receiver, inbox, target, schedule, version=2, delta=delta)
    batches = [None] * 4
    dist.all_gather_object(batches, entered)
    assert all(batches) and stuck_ranks(dict(enumerate(batches))) == {}
    batches[rank] = batches[rank][:-1]
    assert stuck_ranks(dict(enumerate(batches))) != {}


def record_batches() -> list[list[Message]]:
    """The messages of every batch that this process enters from now on."""
    issue, batches = dist.batch_isend_irecv, []

    def record(operations):
        batches.append([(one.peer, one.op is dist.isend, one.tensor.nbytes) for one in operations])
        return issue(operations)

    dist.batch_isend_irecv = record
    return batches


def relay_rounds(sender, receiver, inbox, target, schedule, *, version, delta=None) -> None:
    """One update; with a delta its checksums are compared with the origin's."""
    if receiver is not None:
        receiver.start(target, inbox, with_checksums=False, version=version, delta=delta)
    for number in range(num_rounds(schedule)):
        sender.fill(number)
        dist.barrier()
        if receiver is not None:
            receiver.take(number)
        dist.barrier()
    if receiver is not None:
        receiver.finish()


class Kept:
    """A target that keeps every shard."""

    def __init__(self):
        self.done, self.old = {}, {}

    def begin(self, name, shape):
        return self.old.get(name, torch.zeros(shape))

    def complete(self, name, tensor):
        self.done[name] = tensor

    def compare(self, folder, layout, position):
        hf = load_file(folder / "model.safetensors")
        for shard in layout.engine_shards(position):
            for offset, run in shard.placed_runs():
                expected = hf[run.tensor].narrow(shard.axis, run.start, run.size)
                actual = self.done[shard.name].narrow(shard.axis, offset, run.size)
                assert torch.equal(actual, expected), shard.name


def send_and_compare(rank: int, folder: Path, engine: EngineShape) -> None:
    """Two trainer ranks, and an engine of two ranks or two engines of one, joined by messages."""
    layout = open_layout(folder)
    positions = replica_positions(layout, pp_size=2)
    plan = make_plan(layout, positions, engine, itemsize=4, max_bundle_bytes=BUCKET)
    rounds = range(num_rounds(pack(plan, BUCKET)))
    offers = [None] * 4
    if rank < 2:
        position = positions[rank]
        params = rank_params(folder, layout, position)
        sender = WeightSender(params, layout, position, rank)
        offer = sender.prepare(plan, bucket_bytes=BUCKET, dtype=torch.float32, transport="nccl")
        dist.all_gather_object(offers, offer)
        sender.connect(offers)
        sent = count_sent(sender._prepared.outbox)
        for _ in range(2):
            for number in rounds:
                sender.fill(number)
            dist.barrier()
        # once for all engines of the node, in each update
        planned = [plan.bundle(one).num_bytes for one in plan.transfers if one.feeder == rank]
        assert sum(sent) == 2 * sum(planned)
        return
    dist.all_gather_object(offers, None)
    place = (rank - 2, 0) if engine.num_ranks == 2 else (0, rank - 2)
    position = engine.position(place[0])
    receiver = WeightReceiver(
        plan, layout.engine_shards(position), engine=0, engine_rank=place[0],
        bucket_bytes=BUCKET, dtype=torch.float32,
    )  # fmt: skip
    inbox = open_inbox(
        "nccl", offers, feeders=receiver.feeders, num_bytes=receiver.largest_wave,
        device=torch.device("cpu"), seat=plan.seat(0, place[0], place[1]),
    )  # fmt: skip
    for _ in range(2):
        target = Kept()
        receiver.start(target, inbox, with_checksums=False)
        for number in rounds:
            receiver.take(number)
        receiver.finish()
        target.compare(folder, layout, position)
        dist.barrier()


def count_sent(outbox) -> list[int]:
    """Bytes of every message that an outbox sends from now on."""
    group, sent = outbox._group, []

    class Counting:
        def send(self, tensors, peer, tag):
            sent.extend(one.nbytes for one in tensors)
            return group.send(tensors, peer, tag)

    outbox._group = Counting()
    return sent


def peak_growth(function) -> int:
    """Bytes by which this process grows while `function` runs, shared memory included."""
    # the program itself counts too, page by page as it is used for the first time
    checksum(torch.ones(4 * CHECKSUM_CHUNK))
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of_this_process("VmHWM")
    function()
    return memory_of_this_process("VmHWM") - before


def memory_of_this_process(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith(what)]
    return 1024 * int(kib)


def relay_and_measure(rank: int, folder: Path) -> None:
    """One rank on one node holds half of the model; the engine and three ranks are on another."""
    layout = open_layout(folder)
    positions = replica_positions(layout, pp_size=4, stages=[(0, 1, 2), (3,), (4,), (5,)])
    plan = make_plan(
        layout, positions, EngineShape(nodes=("b",)), itemsize=4,
        max_bundle_bytes=piece_bytes(LARGE_BUCKET), source_nodes=["a", "b", "b", "b"],
    )  # fmt: skip
    params = rank_params(folder, layout, positions[rank])
    sender = WeightSender(params, layout, positions[rank], rank)
    staged = sum(plan.bundle(one).num_bytes for one in plan.transfers if one.origin == 0)
    assert staged > 4 * LARGE_BUCKET

    # memory counts when it is first touched, which no bucket is before the first round
    sender.prepare(plan, bucket_bytes=LARGE_BUCKET, dtype=torch.float32, transport="shared_memory")
    sender.opened()

    def update() -> None:
        for number in range(num_rounds(pack(plan, LARGE_BUCKET))):
            sender.fill(number, with_checksums=True)

    dist.barrier()
    grown = peak_growth(update)
    assert grown <= 2 * LARGE_BUCKET + NOISE, f"rank {rank} grew by {grown} bytes"
    dist.barrier()


class Live(Kept):
    """A target whose parameters are there before the update, as on CUDA."""

    def __init__(self, shapes):
        self.done = {name: torch.ones(shape) for name, shape in shapes.items()}

    def begin(self, name, shape):
        return self.done[name]

    def complete(self, name, tensor):
        pass


def send_and_measure(rank: int, folder: Path) -> None:
    """Three replicas, each of which sends to one engine rank whenever it has a bucket full."""
    layout = open_layout(folder)
    positions = replica_positions(layout, num_dp=3)
    engine = EngineShape(nodes=("",))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=piece_bytes(LARGE_BUCKET)
    )
    sizes = {"bucket_bytes": LARGE_BUCKET, "dtype": torch.float32}
    schedule = pack(plan, LARGE_BUCKET)
    assert max(one.wave for bucket in schedule[0] for one in bucket) > 0
    rounds = range(num_rounds(schedule))
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
        receiver = WeightReceiver(
            plan, layout.engine_shards(engine.position(0)), engine=0, engine_rank=0, **sizes
        )
        assert receiver.largest_wave > LARGE_BUCKET / 2
        target = Live(receiver.shapes)
        dist.all_gather_object(offers, None)
        inbox = open_inbox(
            "nccl", offers, feeders=receiver.feeders, num_bytes=receiver.largest_wave,
            device=torch.device("cpu"), seat=plan.seat(0, 0),
        )  # fmt: skip

        def update() -> None:
            receiver.start(target, inbox, with_checksums=True)
            for number in rounds:
                receiver.take(number)
            receiver.finish()
            dist.barrier()

    dist.barrier()
    grown = peak_growth(update)
    assert grown <= 2 * LARGE_BUCKET + NOISE, f"rank {rank} grew by {grown} bytes"
    if rank == 3:
        target.compare(folder, layout, engine.position(0))
    dist.barrier()


@pytest.fixture
def large_model(tmp_path, monkeypatch) -> Path:
    """Large beside what a process allocates by the way."""
    # every tensor is given back to the system when it is freed, so that none hides another
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    sizes = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "num_hidden_layers": 6}
    return make_model(tmp_path / "model", "Llama", **sizes)


def test_relaying_to_three_feeders_takes_no_more_than_two_buckets(large_model, tmp_path):
    """Catches slices that are staged beside the buckets: one rank stages for every feeder."""
    run_ranks(relay_and_measure, 4, tmp_path, large_model, fresh=True)


@pytest.mark.full
def test_receiving_from_three_feeders_takes_no_more_than_two_buckets(large_model, tmp_path):
    """Catches an engine rank that receives whatever all feeders send in a round at once."""
    run_ranks(send_and_measure, 4, tmp_path, large_model, fresh=True)


@pytest.mark.parametrize("engine", [
    EngineShape(tp_size=2), EngineShape(copies=(2,)),
], ids=["two ranks", "two engines of a node"])  # fmt: skip
def test_separate_devices_are_joined_by_messages_in_plan_order(tmp_path, engine):
    """Catches a bucket overwritten before it was received, messages taken for one another, and a
    second engine of a node that is sent everything again."""
    run_ranks(send_and_compare, 4, tmp_path, make_model(tmp_path / "model", "Qwen2"), engine)


@pytest.mark.parametrize("engine,places", [
    (EngineShape(tp_size=2, nodes=("b",)), ["a", "a", "b", "b"]),
    (EngineShape(nodes=("engine 0", "engine 1")), ["", "", "engine 0", "engine 1"]),
], ids=["one engine", "two engines"])  # fmt: skip
def test_slices_from_another_node_reach_the_engine_through_a_feeder(tmp_path, engine, places):
    """Catches a relay that waits for a message nobody sends, or fills the wrong place; and what is
    handed on to a second engine before it has come, or from the wrong place of a bucket."""
    folder = make_model(tmp_path / "model", "Qwen2")
    run_ranks(relay_and_compare, 4, tmp_path, folder, engine, places)
