"""The plan of an update: every element once, evenly, its topology, and those of shipped recipes."""

import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megadapo
from megadapo.cli import run_command
from megadapo.config import load_config
from megadapo.errors import WeightError
from megadapo.models.folder import find_hf_config
from megadapo.plan.refit import plan_for
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.cuts import round_up
from megadapo.weights.layout.layout import layout_for
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.layout.shards import EnginePosition
from megadapo.weights.sync.buckets import max_bundle_bytes, pack
from megadapo.weights.sync.plan import ALIGNMENT, EngineShape, plan_from_json
from megadapo.weights.sync.planning import find_topology, make_plan
from megadapo.weights.sync.transports import point_to_point
from tests.support import REPOSITORY
from tests.support.models.large import (
    BUCKET,
    QWEN_32B,
    QWEN_235B,
    SHALLOW_235B,
    SHALLOW_STAGES,
    STAGES_235B,
)
from tests.support.models.tiny_models import FAMILY_NAMES
from tests.support.weights.message_order import stuck_ranks

CONFIGS = Path(megadapo.__file__).parents[1] / "configs"
NUM_LAYERS = 4
MOST = max_bundle_bytes(BUCKET)
"""One layer per stage; all layers have the same transfers."""
RECIPES = sorted(path.stem for path in CONFIGS.glob("qwen*.toml"))
SHARED = [name for name in RECIPES if not load_config(CONFIGS / f"{name}.toml").sampling.overlaps]
"""Recipes whose engines may share the trainer's GPUs."""
GPUS_PER_NODE = 8
RECIPE = """
[run]
folder = "runs/x"
num_steps = 1
[model]
path = "{path}"
dtype = "bfloat16"
[data]
train = "data.parquet"
[rollout]
num_engines = 8
{engine}
tensor_parallel = 8
[trainer]
tensor_parallel = 8
pipeline_parallel = 4
data_parallel = 16
{split}
[trainer.optimizer]
warmup_steps = 1
[cluster]
placement = "{placement}"
"""


def engine_names(shard):
    """Return one key per parameter, or per expert of a stacked one."""
    return shard.name if shard.expert is None else (shard.name, shard.expert)


def copied_ranges(plan, engine, engine_rank):
    """Return parameter -> the ranges along its split axis that its copies fill."""
    ranges = {}
    for transfer in plan.transfers:
        if (transfer.receiver, transfer.engine_rank) == (engine, engine_rank):
            for _, copy in plan.slices(transfer):
                key = copy.target_name
                key = key if copy.expert is None else (key, copy.expert)
                stop = copy.target_offset + copy.size
                ranges.setdefault(key, []).append((copy.target_offset, stop))
    return ranges


def assert_filled_exactly_once(ranges, length):
    ranges = sorted(ranges)
    assert ranges[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert ranges[-1][1] == length


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("trainer", [
    {}, {"tp_size": 2}, {"pp_size": 2, "stages": [(0, 1, 3), (2, 4)]},
    {"tp_size": 4, "pp_size": 2, "num_dp": 3},
])  # fmt: skip
@pytest.mark.parametrize("engine", [
    EngineShape(), EngineShape(tp_size=2, nodes=("", "")), EngineShape(tp_size=4),
    EngineShape(tp_size=2, pp_size=2), EngineShape(tp_size=2, expert_parallel=True),
])  # fmt: skip
def test_every_position_is_copied_once(model_folders, family, trainer, engine):
    layout = open_layout(model_folders[family])
    positions = replica_positions(layout, **trainer)
    plan = make_plan(layout, positions, engine, itemsize=4, max_bundle_bytes=4096)
    for number in range(len(engine.nodes)):
        for rank in range(engine.num_ranks):
            ranges = copied_ranges(plan, number, rank)
            shards = {
                engine_names(shard): shard for shard in layout.engine_shards(engine.position(rank))
            }
            assert ranges.keys() == shards.keys()
            for name, shard in shards.items():
                assert_filled_exactly_once(ranges[name], sum(span.size for span in shard.spans))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_copies_carry_the_bytes_they_claim(model_folders, family):
    """Catches copies from a wrong source: every element has its own number."""
    layout = open_layout(model_folders[family])
    positions = replica_positions(layout, tp_size=4, pp_size=2, num_dp=2)
    engine = EngineShape(tp_size=2)
    plan = make_plan(layout, positions, engine, itemsize=4, max_bundle_bytes=2048)
    full, start = {}, 0
    for name, shape in layout.hf_shapes.items():
        count = torch.Size(shape).numel()
        full[name] = torch.arange(start, start + count).view(shape)
        start += count

    def local(shard):
        parts = [full[s.tensor].narrow(shard.axis, s.start, s.size) for s in shard.spans]
        return torch.cat(parts, dim=shard.axis) if parts else torch.empty(0)

    sources = [
        {shard.name: local(shard) for shard in layout.megatron_shards(position)}
        for position in positions
    ]
    targets = [
        {engine_names(shard): local(shard) for shard in layout.engine_shards(engine.position(rank))}
        for rank in range(2)
    ]
    for transfer in plan.transfers:
        for _, copy in plan.slices(transfer):
            key = copy.target_name if copy.expert is None else (copy.target_name, copy.expert)
            source = sources[transfer.owner][copy.source_name]
            target = targets[transfer.engine_rank][key]
            assert torch.equal(
                source.narrow(copy.axis, copy.source_offset, copy.size),
                target.narrow(copy.axis, copy.target_offset, copy.size),
            ), copy


@pytest.mark.parametrize("model,trainer,engine", [
    (QWEN_32B, {"tp_size": 8, "pp_size": 4, "num_dp": 16}, {"tp_size": 8}),
    (SHALLOW_235B, {"tp_size": 4, "pp_size": 4, "num_dp": 32, "ep_size": 32, "etp_size": 1,
                    "stages": SHALLOW_STAGES}, {"tp_size": 8}),
    (SHALLOW_235B, {"tp_size": 4, "pp_size": 4, "num_dp": 32, "ep_size": 16, "etp_size": 2,
                    "stages": SHALLOW_STAGES}, {"tp_size": 8, "expert_parallel": True}),
    pytest.param(
        QWEN_235B, {"tp_size": 4, "pp_size": 4, "num_dp": 32, "ep_size": 16, "etp_size": 2,
                    "stages": STAGES_235B}, {"tp_size": 8, "expert_parallel": True},
        marks=pytest.mark.full),
], ids=["32B", "EP32, 24 layers", "EP16 to EP8, 24 layers", "235B EP16 to EP8"])  # fmt: skip
def test_512_ranks_are_planned_evenly(model, trainer, engine):
    """Catches one replica that sends everything."""
    layout = layout_for(model)
    positions = replica_positions(layout, **trainer)
    assert len(positions) == 512
    shape = EngineShape(**engine, nodes=("",) * 8)
    plan = make_plan(layout, positions, shape, itemsize=2, max_bundle_bytes=MOST)
    sent, received = Counter(), Counter()
    for transfer in plan.transfers:
        size = plan.bundle(transfer).num_bytes
        sent[transfer.sender] += size
        received[transfer.receiver, transfer.engine_rank] += size
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / 512
    assert len(received) == 64
    assert max(received.values()) <= 1.1 * sum(received.values()) / 64


def test_planning_work_is_that_of_one_replica():
    """Catches work that is repeated for each replica, or quadratic in ranks: it took minutes."""
    layout = layout_for(QWEN_32B)

    def calls(num_dp):
        positions = replica_positions(layout, tp_size=8, pp_size=4, num_dp=num_dp)
        engine, events = EngineShape(tp_size=8, nodes=("",) * 8), Counter()
        sys.setprofile(lambda frame, event, argument: events.update([event]))
        try:
            make_plan(layout, positions, engine, itemsize=2, max_bundle_bytes=MOST)
        finally:
            sys.setprofile(None)
        return events.total()

    assert calls(num_dp=16) < 1.2 * calls(num_dp=4)


def test_plan_round_trips_through_json(model_folders):
    layout = open_layout(model_folders["Qwen3Moe"])
    positions = replica_positions(layout, tp_size=2, ep_size=2, num_dp=2)
    plan = make_plan(layout, positions, EngineShape(tp_size=2), itemsize=2, max_bundle_bytes=999)
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_bucket_smaller_than_row_is_refused(model_folders):
    layout = open_layout(model_folders["Qwen2"])
    with pytest.raises(WeightError, match=r"weights.bucket_mib is too small"):
        make_plan(layout, replica_positions(layout), EngineShape(), itemsize=4, max_bundle_bytes=64)


def test_sender_is_on_engine_node(model_folders):
    layout = open_layout(model_folders["Qwen2"])
    positions = replica_positions(layout, tp_size=2, pp_size=2)
    nodes = ["a", "a", "b", "b"]
    engine = EngineShape(tp_size=2, nodes=("a", "b"))
    plan = make_plan(
        layout, positions, engine, itemsize=4, max_bundle_bytes=4096, source_nodes=nodes
    )
    for transfer in plan.transfers:
        assert nodes[transfer.sender] == engine.nodes[transfer.receiver]
        if nodes[transfer.owner] == engine.nodes[transfer.receiver]:
            assert transfer.owner == transfer.sender


def test_few_kv_heads_are_repeated(model_folders):
    """Catches an even split of 2 KV heads over 4 ranks; vLLM gives each rank a whole head."""
    layout = open_layout(model_folders["Llama"])
    heads = []
    for rank in range(4):
        position = EnginePosition(tp_rank=rank, tp_size=4)
        (qkv,) = [s for s in layout.engine_layer(position, "0") if "qkv_proj" in s.name]
        heads.append([(span.start, span.stop) for span in qkv.spans if "k_proj" in span.tensor])
    assert heads == [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]]


def test_bytes_cross_to_each_node_once():
    """Each of 16 nodes has two engines, and half of the tensor-parallel ranks of two stages."""
    layout = layout_for(QWEN_32B | {"num_hidden_layers": 8})
    positions = replica_positions(layout, tp_size=8, pp_size=2, num_dp=8)
    ranks = [(f"node {rank // 8}", str(rank % 8)) for rank in range(128)]
    engine_nodes = [f"node {engine // 2}" for engine in range(32)]
    gpus = [tuple("0123"), tuple("4567")] * 16
    places = find_topology(ranks, engine_nodes, gpus)
    plan = make_plan(
        layout, positions, EngineShape(tp_size=4, nodes=tuple(places.receivers)), itemsize=2,
        max_bundle_bytes=MOST, source_nodes=places.sources, hosts=places.hosts,
    )  # fmt: skip
    node = [name for name, _ in ranks]
    came, crossed, in_node = Counter(), 0, 0
    for one in plan.transfers:
        size = plan.bundle(one).num_bytes
        assert places.sources[one.sender] == places.receivers[one.receiver]
        if node[one.relay] != node[one.sender]:
            came[node[one.sender], one.block, one.bundle] += 1
            crossed += size
        elif one.relay != one.sender:
            in_node += size
    assert max(came.values()) == 1
    # every node has one of the two stages, and needs the other one
    full = sum(2 * torch.Size(shape).numel() for shape in layout.hf_shapes.values())
    assert crossed < 1.01 * 16 * full / 2
    assert in_node > 0

    schedule = pack(plan, BUCKET)
    at = {
        (placed.sender, placed.transfer.block, placed.transfer.bundle): (number, placed)
        for number, placed in schedule
    }
    assert len(at) == len(plan.transfers)
    for one in plan.transfers:
        if one.is_forwarded:
            number, placed = at[one.sender, one.block, one.bundle]
            # forwarded in the same round, from the same offset
            its_number, its_placed = at[one.relay, one.block, one.bundle]
            assert (number, placed.staged_at) == (its_number, its_placed.offset)
            assert its_placed.transfer.sender == one.relay
            assert its_placed.transfer.owner == one.owner


def on_gpus(nodes: int, per_node: int) -> list[tuple[str, str]]:
    return [(f"n{node}", str(gpu)) for node in range(nodes) for gpu in range(per_node)]


def test_engines_of_one_node_share_memory():
    places = find_topology([("n0", None)] * 4, ["n0", "n0"], [(), ()])
    assert places.transport == "shared_memory"
    assert places.receiver_of == [0, 0] and places.receivers == ["n0"]
    assert places.sources == ["n0"] * 4 and places.engines_per_receiver == ()


def test_cpu_engines_use_memory_of_own_node_or_messages():
    ranks = [("n0", None), ("n1", None)]
    spread = find_topology(ranks, ["n1", "n0"], [(), ()])
    assert spread.transport == "shared_memory" and spread.sources == ["n0", "n1"]
    assert spread.receivers == ["n1", "n0"]
    apart = find_topology(ranks, ["n1", "n2"], [(), ()])
    assert apart.transport == "nccl" and apart.sources is None


def test_engine_opens_only_visible_gpus():
    gpus = [tuple("0123"), tuple("4567")] * 2
    nodes = ["n0", "n0", "n1", "n1"]
    places = find_topology(on_gpus(2, 8), nodes, gpus)
    assert places.transport == "cuda_ipc" and places.receiver_of == [0, 1, 2, 3]
    assert places.sources == [f"engine {rank // 4}" for rank in range(16)]


def test_engines_on_other_gpus_get_messages_once_per_node():
    nodes, gpus = ["n1", "n2", "n1", "n1"], [(gpu,) for gpu in "0012"]
    places = find_topology(on_gpus(1, 4), nodes, gpus)
    assert places.transport == "nccl" and places.sources is None
    assert places.receivers == ["n1", "n2"] and places.receiver_of == [0, 1, 0, 0]
    assert places.engines_per_receiver == (3, 1) and places.member_of_each == [0, 0, 1, 2]
    # The same GPU numbers on another node are other GPUs.
    assert find_topology(on_gpus(1, 4), ["n1"], [tuple("01")]).transport == "nccl"


@cache
def planned(name: str, placement: str) -> SimpleNamespace:
    """Plan a recipe on nodes of eight GPUs; schedule a full update and a delta update."""
    config = load_config(CONFIGS / f"{name}.toml", [f"cluster.placement={placement}"])
    layout = layout_for(find_hf_config(config.model.path) | {"num_hidden_layers": NUM_LAYERS})
    cluster = config.cluster.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"cluster": cluster})
    plan, hosts = plan_for(config, layout, gpus_per_node=GPUS_PER_NODE)
    bucket_bytes = int(config.weights.bucket_mib * 2**20)
    full = pack(plan, bucket_bytes)
    sizes = [round_up(plan.bundle(one).num_bytes // 20, ALIGNMENT) for one in plan.transfers]
    schedules = {"full": full, "delta": full.repack(sizes)}
    return SimpleNamespace(
        config=config, layout=layout, plan=plan, hosts=hosts, schedules=schedules
    )


@pytest.mark.parametrize(
    ("name", "placement"),
    [*((name, "colocated") for name in SHARED), *((name, "separate") for name in RECIPES)],
)
def test_recipe_sends_each_byte_to_a_node_once(name, placement):
    """Catches bytes that a node gets twice, or although one of its ranks has them."""
    case = planned(name, placement)
    plan, hosts = case.plan, case.hosts
    came: Counter[tuple[str, int, int]] = Counter()
    num_bytes: Counter[str] = Counter()
    for one in plan.transfers:
        node = hosts.receivers[one.receiver]
        if hosts.sources[one.relay] != node:
            came[node, one.block, one.bundle] += 1
            num_bytes[node] += plan.bundle(one).num_bytes
    assert max(came.values(), default=1) == 1
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in case.layout.hf_shapes.items()}
    model = sum(sizes.values())
    # every rank of an engine receives all norms and routers
    repeated = sum(size for name, size in sizes.items() if "norm" in name or ".gate." in name)
    most = model + (plan.engine.tp_size - 1) * repeated
    assert repeated < 0.002 * model
    assert max(num_bytes.values(), default=0) <= most
    if placement == "separate":
        assert len(num_bytes) == len(set(hosts.receivers)) == len(hosts.receivers)
        assert min(num_bytes.values()) >= model
        assert plan.engine.num_engines() == case.config.rollout.num_engines


@pytest.mark.parametrize("name", SHARED)
def test_all_network_cards_share_what_nodes_get(name):
    """Catches a node whose first engine gets everything, through half of the node's cards."""
    case = planned(name, "colocated")
    came: Counter[int] = Counter()
    for one in case.plan.transfers:
        if case.hosts.sources[one.relay] != case.hosts.sources[one.sender]:
            came[one.sender] += case.plan.bundle(one).num_bytes
    if came:
        assert len(came) == case.plan.num_sources
        assert max(came.values()) <= 1.1 * sum(came.values()) / len(came)


@pytest.mark.parametrize("name", ["qwen2.5-32b-async", "qwen3-30b-a3b"])
def test_one_replica_compares_most_bundles_of_separate_engines(name):
    """Catches four replicas that all compare, and keep in main memory, the whole model."""
    plan = planned(name, "separate").plan
    owners = {
        (one.owner, one.block, one.bundle): plan.bundle(one).num_bytes for one in plan.transfers
    }
    bundles = {key[1:]: size for key, size in owners.items()}
    assert sum(owners.values()) < 2 * sum(bundles.values())


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("name", SHARED)
def test_relay_never_blocks(name, kind):
    case = planned(name, "colocated")
    ranks = range(case.plan.num_sources)
    relays = {rank: case.schedules[kind].relay_batches(rank) for rank in ranks}
    batches = {
        rank: [
            [message_of(placed, rank) for placed in batch]
            for _, both in sorted(relays[rank].items())
            for batch in both
            if batch
        ]
        for rank in ranks
    }
    assert stuck_ranks(batches) == {}
    assert_every_rank_is_missed(batches)


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("name", RECIPES)
def test_waves_never_block(name, kind, monkeypatch):
    """Catches engines that forward in another order, and a wave that no rank sends."""
    case = planned(name, "separate")
    batches = message_batches(case, case.schedules[kind], monkeypatch)
    assert len(batches) == case.plan.num_ranks
    assert stuck_ranks(batches) == {}
    assert_every_rank_is_missed(batches)


def message_of(placed, rank):
    sends = rank != placed.sender
    return (placed.sender if sends else placed.transfer.relay, sends, placed.num_bytes)


def assert_every_rank_is_missed(batches):
    """Check that other ranks block if a rank skips its last batch."""
    ranks = [rank for rank, own in batches.items() if own]
    for rank in ranks[:: max(1, len(ranks) // 5)]:
        assert stuck_ranks({**batches, rank: batches[rank][:-1]}) != {}, rank


class Recorder:
    """A process group that only records messages, batch by batch."""

    def __init__(self):
        self.batches = []

    def send(self, tensors, peer, tag):
        self.batches[-1].append((peer, True, tensors[0].nbytes))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, peer, tag):
        self.batches[-1].append((peer, False, tensors[0].nbytes))
        return SimpleNamespace(wait=lambda: None)


def issue_together(group, device, operations):
    group.batches.append([])
    return [operation() for operation in operations]


def message_batches(case, schedule, monkeypatch):
    """Run the transport on meta tensors; return rank -> its batches of messages."""
    monkeypatch.setattr(point_to_point, "issue_together", issue_together)
    groups: dict[int, Recorder] = {}

    def join_group(offers, device, *, rank, num_ranks, store=None):
        groups[rank] = Recorder()
        return groups[rank], None

    monkeypatch.setattr(point_to_point, "join_group", join_group)
    plan, device = case.plan, torch.device("meta")
    num_bytes = int(case.config.weights.bucket_mib * 2**20)
    arriving: dict[tuple[int, int, int], list] = {}
    for rank, rounds in enumerate(schedule.buckets):
        outbox = point_to_point.PointToPointOutbox(
            num_bytes, device, rank=rank, num_ranks=plan.num_ranks
        )
        outbox.connect([])
        for number, bucket in enumerate(rounds):
            outbox.post(number, bucket)
            for placed in bucket:
                to = placed.transfer
                arriving.setdefault((to.receiver, to.engine_rank, number), []).append(placed)
    engine = plan.engine
    for number in range(len(engine.nodes)):
        for member in range(plan.num_members(number)):
            for engine_rank in range(engine.num_ranks):
                ranks = [
                    plan.engine_rank_number(number, engine_rank, other)
                    for other in range(plan.num_members(number))
                ]
                before, after = [None, *ranks][member], [*ranks, None][member + 1]
                inbox = point_to_point.PointToPointInbox(
                    [], num_bytes, device, rank=ranks[member], num_ranks=plan.num_ranks,
                    previous=before, following=after,
                )  # fmt: skip
                for round_number in range(schedule.num_rounds):
                    own = arriving.get((number, engine_rank, round_number), [])
                    list(inbox.receive(round_number, sorted(own, key=lambda one: one.wave)))
    return {rank: group.batches for rank, group in groups.items()}


def plan(tmp_path, *words, placement="separate", split="", engine=""):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(path=tmp_path, placement=placement, split=split, engine=engine))
    return run_command(["weights", "plan", str(recipe), *words])


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_report_shows_bytes_and_memory_of_update(tmp_path, capsys, placement):
    """Catches staged slices left out: two buckets of 64 MiB hold everything."""
    plan(tmp_path, placement=placement)
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8" in text
    assert "0 B of them between nodes" not in text
    trainer, engine = re.findall(r"memory, (?:trainer|engine) rank +([\d.]+) MiB at most", text)
    assert 100 < float(trainer) <= 128 and 50 < float(engine) <= 64
    if placement == "separate":
        # 32.76 G parameters of 2 bytes, 8 times, and every rank's own copy of the replicated norms
        assert "bytes moved           488.3 GiB, 488.3 GiB of them between nodes" in text
        assert "(1.000 x)" in text


def test_report_uses_recipe_split(tmp_path, capsys):
    plan(tmp_path, split="virtual_pipeline = 2", engine="pipeline_parallel = 2")
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8 x PP 2" in text
    assert "(1.000 x)" in text


def test_update_of_a_shipped_recipe_is_planned_without_its_model(capsys):
    """Catches a command that asks for the model's files, which `plan` does not need."""
    run_command(["weights", "plan", str(REPOSITORY / "configs" / "qwen2.5-7b.toml")])
    assert "driver: calls, waits" in capsys.readouterr().out
