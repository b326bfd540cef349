"""The schedule of an update needs no more memory than two buckets per rank; checksums."""

from collections import Counter, defaultdict

import pytest
import torch

from megadapo.weights.layout.layout import layout_for
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.buckets import (
    CHECKSUM_CHUNK,
    CHECKSUM_MODULUS,
    checksum,
    max_bundle_bytes,
    pack,
)
from megadapo.weights.sync.plan import ALIGNMENT, EngineShape
from megadapo.weights.sync.planning import make_plan
from tests.support.models.large import (
    BUCKET,
    QWEN_32B,
    QWEN_235B,
    SHALLOW_235B,
    SHALLOW_STAGES,
    STAGES_235B,
)

DENSE = (QWEN_32B, {"tp_size": 8, "pp_size": 4, "num_dp": 16}, {})
EXPERTS = {"tp_size": 4, "pp_size": 4, "num_dp": 32, "ep_size": 16, "etp_size": 2}
MOE = (QWEN_235B, EXPERTS | {"stages": STAGES_235B}, {"expert_parallel": True})
SHALLOW = (SHALLOW_235B, EXPERTS | {"stages": SHALLOW_STAGES}, {"expert_parallel": True})
RANK_NODES = [f"node {rank // 8}" for rank in range(512)]
PLACES = {
    "apart": (None, ("",) * 8),
    "eight nodes": (RANK_NODES, tuple(f"node {8 * engine}" for engine in range(8))),
    "two nodes": (RANK_NODES, ("node 0", "node 63")),
}


def plan_of(case, place, bucket_bytes=BUCKET):
    model, trainer, engine = case
    layout = layout_for(model)
    nodes, engine_nodes = PLACES[place]
    return make_plan(
        layout, replica_positions(layout, **trainer),
        EngineShape(tp_size=8, nodes=engine_nodes, **engine), itemsize=2,
        max_bundle_bytes=max_bundle_bytes(bucket_bytes), source_nodes=nodes,
    )  # fmt: skip


def ranges_in_buckets(plan, schedule):
    """Return (rank, round) -> the byte ranges that the rank uses in its bucket."""
    ranges = defaultdict(list)
    for number, one in schedule:
        size = plan.bundle(one.transfer).num_bytes
        ranges[one.sender, number].append((one.offset, one.offset + size))
        assert (one.staged_at is None) == (one.transfer.owner == one.sender)
        if one.staged_at is not None:
            ranges[one.transfer.owner, number].append((one.staged_at, one.staged_at + size))
    return ranges


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(DENSE, id="32B"),
        pytest.param(SHALLOW, id="235B, 24 layers"),
        pytest.param(MOE, id="235B", marks=pytest.mark.full),
    ],
)
def test_update_of_64_ranks_from_512_fits_in_two_buckets(case, place):
    plan = plan_of(case, place)
    schedule = pack(plan, BUCKET)
    assert Counter(one.transfer for _, one in schedule) == Counter(plan.transfers)

    used = ranges_in_buckets(plan, schedule)
    for ranges in used.values():
        ranges.sort()
        assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
        assert all(start % ALIGNMENT == 0 for start, _ in ranges)
        assert ranges[-1][1] <= BUCKET
    fullest = schedule.capacity.buckets
    assert max(fullest) <= BUCKET
    assert all(ranges[-1][1] <= fullest[rank] for (rank, _), ranges in used.items())

    received = Counter()
    for number, one in schedule:
        received[one.target, number, one.wave] += plan.bundle(one.transfer).num_bytes
    assert max(received.values()) == max(schedule.capacity.waves.values()) <= BUCKET
    # several senders reach one engine rank in the same round
    assert max(wave for *_, wave in received) > 0

    load = Counter()
    for (rank, _), ranges in used.items():
        load[rank] += sum(stop - start for start, stop in ranges)
    assert schedule.num_rounds <= 1.2 * max(load.values()) / BUCKET + 1


def test_relay_to_many_senders_takes_rounds_not_memory():
    """Catches a relay without a memory bound: one owner, seven senders."""
    layout = layout_for(QWEN_32B | {"num_hidden_layers": 8})
    stages = [tuple(range(8)), *[()] * 7]
    positions = replica_positions(layout, pp_size=8, stages=stages)
    plan = make_plan(
        layout, positions, EngineShape(nodes=("b",)), itemsize=2,
        max_bundle_bytes=max_bundle_bytes(BUCKET), source_nodes=["a", *"bbbbbbb"],
    )  # fmt: skip
    schedule = pack(plan, BUCKET)
    staged = Counter()
    for number, one in schedule:
        if one.staged_at is not None and one.transfer.owner == 0:
            staged[number] += plan.bundle(one.transfer).num_bytes
    assert len(staged) > 50 and max(staged.values()) <= BUCKET
    assert sum(staged.values()) > 7 * BUCKET


def definition(tensor: torch.Tensor) -> int:
    words = tensor.contiguous().view(-1).view(torch.int16).tolist()
    weighted = sum(place * word for place, word in enumerate(words, 1))

    def wrapped(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    return (wrapped(sum(words)) * 0x9E3779B1 + wrapped(weighted)) % CHECKSUM_MODULUS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_words", [0, 2, 99, 100, 102, 300, 1000])
@pytest.mark.parametrize("chunk", [100, 1 << 24])
def test_checksum_equals_definition(monkeypatch, dtype, num_words, chunk):
    """A GPU sums larger chunks than a CPU, and their numbers are compared."""
    monkeypatch.setitem(CHECKSUM_CHUNK, "cpu", chunk)
    torch.manual_seed(num_words)
    tensor = torch.randn(num_words * 2 // dtype.itemsize).to(dtype)
    assert checksum(tensor) == definition(tensor)
    strided = torch.randn(num_words, 3).to(dtype).T
    assert checksum(strided) == definition(strided)
    if len(tensor):
        changed = tensor.clone()
        changed[-1] = -changed[-1]
        assert checksum(changed) == definition(changed) != checksum(tensor)


def test_gigabytes_on_a_gpu_take_few_launches():
    """In chunks of 65,536 words, launching alone took a second of every step."""
    num_words, launches_of_a_chunk = 4 << 30, 7
    assert num_words / CHECKSUM_CHUNK["cuda"] * launches_of_a_chunk < 2000
