"""What trainer ranks do together: gathering full tensors, and relaying slices between nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from megadapo.weights.buckets import num_rounds, pack
from megadapo.weights.export import export_weights
from megadapo.weights.gather import ProcessGroups, gather_weights
from megadapo.weights.load import import_weights
from megadapo.weights.megatron_folder import open_layout
from megadapo.weights.placement import replica_positions
from megadapo.weights.plan import EngineShape
from megadapo.weights.planning import make_plan
from megadapo.weights.receiver import WeightReceiver
from megadapo.weights.sender import WeightSender
from megadapo.weights.shared_memory import SharedMemoryInbox
from megadapo.weights.transports import open_inbox

sys.path.append(str(Path(__file__).parents[1] / "unit" / "weights"))
from weight_models import make_model  # noqa: E402

BUCKET = 4096


def run_ranks(function, world_size: int, tmp_path: Path, *args: object) -> None:
    """Run `function(rank, *args)` in processes of one Gloo group."""
    meeting = tmp_path / "meeting"
    meeting.unlink(missing_ok=True)
    mp.spawn(_joined, (world_size, meeting, function, args), nprocs=world_size)


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


def relay_and_compare(rank: int, folder: Path) -> None:
    """Two nodes of two ranks; the engine's stage lives on the other node for half of the model."""
    layout = open_layout(folder)
    positions = replica_positions(layout, tp_size=2, pp_size=2)
    nodes = ["a", "a", "b", "b"]
    engine = EngineShape(tp_size=2, nodes=("b",))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=BUCKET, source_nodes=nodes
    )
    sender = WeightSender(
        rank_params(folder, layout, positions[rank]), layout, positions[rank], rank
    )
    offer = sender.prepare(
        plan, bucket_bytes=BUCKET, dtype=torch.float32, transport="shared_memory"
    )
    offers = [None] * 4
    dist.all_gather_object(offers, offer)
    receiver, inbox, target = None, None, Kept()
    if rank >= 2:
        inbox = SharedMemoryInbox(offers)
        receiver = WeightReceiver(
            plan, layout.engine_shards(engine.position(rank - 2)), engine=0, engine_rank=rank - 2,
            bucket_bytes=BUCKET, dtype=torch.float32,
        )  # fmt: skip
        receiver.start(target, inbox, with_checksums=False)
    for number in range(num_rounds(pack(plan, BUCKET))):
        sender.fill(number)
        dist.barrier()
        if receiver is not None:
            receiver.take(number)
        dist.barrier()
    if receiver is not None:
        receiver.finish()
        target.compare(folder, layout, engine.position(rank - 2))


class Kept:
    """A target that keeps every shard."""

    def __init__(self):
        self.done = {}

    def begin(self, name, shape):
        return torch.zeros(shape)

    def complete(self, name, tensor):
        self.done[name] = tensor

    def compare(self, folder, layout, position):
        hf = load_file(folder / "model.safetensors")
        for shard in layout.engine_shards(position):
            for offset, run in shard.placed_runs():
                expected = hf[run.tensor].narrow(shard.axis, run.start, run.size)
                actual = self.done[shard.name].narrow(shard.axis, offset, run.size)
                assert torch.equal(actual, expected), shard.name


def send_and_compare(rank: int, folder: Path) -> None:
    """Two trainer ranks and an engine of two ranks, joined by messages alone."""
    layout = open_layout(folder)
    positions = replica_positions(layout, pp_size=2)
    engine = EngineShape(tp_size=2, nodes=("",))
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
        for _ in range(2):
            for number in rounds:
                sender.fill(number)
            dist.barrier()
        return
    dist.all_gather_object(offers, None)
    inbox = open_inbox("nccl", offers, device=torch.device("cpu"), rank=rank, num_ranks=4)
    receiver = WeightReceiver(
        plan, layout.engine_shards(engine.position(rank - 2)), engine=0, engine_rank=rank - 2,
        bucket_bytes=BUCKET, dtype=torch.float32,
    )  # fmt: skip
    for _ in range(2):
        target = Kept()
        receiver.start(target, inbox, with_checksums=False)
        for number in rounds:
            receiver.take(number)
        receiver.finish()
        target.compare(folder, layout, engine.position(rank - 2))
        dist.barrier()


def test_separate_devices_are_joined_by_messages_in_plan_order(tmp_path):
    """Catches a bucket overwritten before it was received, and messages taken for one another."""
    run_ranks(send_and_compare, 4, tmp_path, make_model(tmp_path / "model", "Qwen2"))


def test_slices_from_another_node_reach_the_engine_through_a_feeder(tmp_path):
    """Catches a relay that waits for a message nobody sends, or fills the wrong place."""
    folder = make_model(tmp_path / "model", "Qwen2")
    run_ranks(relay_and_compare, 4, tmp_path, folder)
