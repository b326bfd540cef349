"""Updates of the shipped recipes: bytes between nodes, message order, and the printed plan."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megadapo
from megadapo.cli import run_command
from megadapo.config import load_config
from megadapo.errors import DataError
from megadapo.models.folder import find_hf_config
from megadapo.plan.refit import plan_for
from megadapo.weights.layout.cuts import round_up
from megadapo.weights.layout.layout import layout_for
from megadapo.weights.sync.buckets import pack
from megadapo.weights.sync.plan import ALIGNMENT
from megadapo.weights.sync.transports import point_to_point
from tests.support.models.large import QWEN_32B
from tests.support.weights.message_order import stuck_ranks

CONFIGS = Path(megadapo.__file__).parents[1] / "configs"
NUM_LAYERS = 4
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
                position = plan.chain_position(number, engine_rank, member)
                inbox = point_to_point.PointToPointInbox([], num_bytes, device, position)
                for round_number in range(schedule.num_rounds):
                    own = arriving.get((number, engine_rank, round_number), [])
                    list(inbox.receive(round_number, sorted(own, key=lambda one: one.wave)))
    return {rank: group.batches for rank, group in groups.items()}


def plan(tmp_path, *words, placement="separate", model=True, split="", engine=""):
    if model:
        (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(path=tmp_path, placement=placement, split=split, engine=engine))
    return run_command(["weights", "plan", str(recipe), *words])


def test_report_counts_bytes_of_every_engine(tmp_path, capsys):
    plan(tmp_path)
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8" in text
    # 32.76 G parameters of 2 bytes, 8 times, and every rank's own copy of the replicated norms
    assert "bytes moved           488.3 GiB, 488.3 GiB of them between nodes" in text
    assert "(1.000 x)" in text


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_report_shows_memory_of_update(tmp_path, capsys, placement):
    """Catches staged slices left out: two buckets of 64 MiB hold everything."""
    plan(tmp_path, placement=placement)
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8" in text
    assert "0 B of them between nodes" not in text
    trainer, engine = re.findall(r"memory, (?:trainer|engine) rank +([\d.]+) MiB at most", text)
    assert 100 < float(trainer) <= 128 and 50 < float(engine) <= 64


def test_report_uses_recipe_split(tmp_path, capsys):
    plan(tmp_path, split="virtual_pipeline = 2", engine="pipeline_parallel = 2")
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8 x PP 2" in text
    assert "(1.000 x)" in text


def test_missing_model_is_named(tmp_path):
    with pytest.raises(DataError, match="--model-config"):
        plan(tmp_path, model=False)
