"""The count of an update's work is what a real update does."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megadapo.cluster.this_node import node_address
from megadapo.plan.refit import count_refit
from megadapo.rollout.pool import publish
from megadapo.rollout.pool.publish import Publisher
from megadapo.weights.config import WeightsConfig
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.sync.delta import Delta
from megadapo.weights.sync.plan import ALIGNMENT, plan_from_json
from megadapo.weights.sync.planning import Hosts
from megadapo.weights.sync.sender import WeightSender
from tests.support.weights.connection import rank_params, receiver_of

CPU, DTYPE = torch.device("cpu"), torch.bfloat16


class Operations(TorchDispatchMode):
    """A count of operations that are no views, and of the bytes that copies write."""

    def __init__(self):
        super().__init__()
        self.count = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [argument.alias_info for argument in func._schema.arguments]
        self.count += not any(one is not None and not one.is_write for one in aliases)
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Engine:
    """An engine of one rank, as vLLM's worker runs it."""

    def __init__(self, layout):
        self.layout = layout

    def node(self):
        return node_address()

    def init_weight_transfer(self, info):
        plan = plan_from_json(info["plan"])
        self.receiver = receiver_of(
            plan, self.layout, dtype=DTYPE, bucket_bytes=info["bucket_bytes"]
        )
        self.inbox = self.receiver.open_inbox(info["transport"], info["offers"], CPU)
        self.weights = {
            name: torch.zeros(shape, dtype=DTYPE) for name, shape in self.receiver.shapes.items()
        }

    def weight_versions(self):
        return [self.receiver.version]

    def start_weight_update(self):
        """Do nothing, as vLLM's worker."""

    def update_weights(self, info):
        if "begin" in info:
            begin = info["begin"]
            delta = None if begin["delta"] is None else Delta(**begin["delta"])
            target = SimpleNamespace(
                begin=lambda name, shape: self.weights[name], complete=lambda name, tensor: None
            )
            self.receiver.start(target, self.inbox, **begin | {"delta": delta})
        for number in info["rounds"]:
            self.receiver.take(number)

    def finish_weight_update(self):
        self.receiver.finish()


class Engines:
    """One engine, whose calls the test answers."""

    policy_version = 0

    def __init__(self, engine):
        self.engine = engine
        self.handles = {0: SimpleNamespace(spec=SimpleNamespace(gpus=()))}

    def publishing(self):
        return nullcontext()

    def updatable(self):
        return [0]

    def incarnation(self, index):
        return index

    def call(self, method, arguments):
        return {0: getattr(self.engine, method)(*arguments[0])}

    def finish_weight_update(self, indices, policy_version, **options):
        self.publisher._call_engines("finish_weight_update", doing="finish")


class CountingPublisher(Publisher):
    """Ranks and engines are threads; counts their calls and operations, and the driver's waits."""

    def use(self, senders, engines):
        self.processes = {"rank": senders, "engine": [engines.engine]}
        self.pools = [ThreadPoolExecutor(1) for _ in (*senders, engines.engine)]
        engines.publisher = self
        self.reset()

    def reset(self):
        self.calls = self.trips = 0
        self.count, self.copied = Counter(), Counter()

    def submit(self, kind, method, args, kwargs):
        self.calls += len(self.processes[kind])
        pools = self.pools[:-1] if kind == "rank" else self.pools[-1:]
        return [
            pool.submit(self.work, (kind, number), getattr(one, method), args, kwargs)
            for number, (pool, one) in enumerate(zip(pools, self.processes[kind], strict=True))
        ]

    def work(self, key, call, args, kwargs):
        with Operations() as operations:
            answer = call(*args, **kwargs)
        self.count[key] += operations.count
        self.copied[key] += operations.copied
        return answer

    def _submit_ranks(self, method, *args, **kwargs):
        return self.submit("rank", method, args, kwargs)

    def _submit_engines(self, method, *args):
        return dict(enumerate(self.submit("engine", method, args, {})))

    def _wait_ranks(self, refs, doing, *, least_s=0.0):
        self.trips += 1
        return [ref.result(60) for ref in refs]

    def _wait_engines(self, refs, doing, **options):
        self.trips += 1
        return {number: ref.result(60) for number, ref in refs.items() if ref is not None}


@pytest.mark.parametrize("span", [publish.ROUNDS_PER_CALL, 3])
def test_count_is_work_of_real_updates(model_folders, monkeypatch, span):
    """Catches a second copy of a slice, a call for each round, and a delta that does more."""
    monkeypatch.setattr(publish, "ROUNDS_PER_CALL", span)
    monkeypatch.setattr(ray, "put", lambda value: value)
    layout = open_layout(model_folders["Qwen2"])
    positions = replica_positions(layout, tp_size=2, num_dp=2)
    params = [rank_params(model_folders["Qwen2"], layout, one) for one in positions]
    senders = [
        WeightSender(own, layout, position, rank)
        for rank, (own, position) in enumerate(zip(params, positions, strict=True))
    ]
    engines = Engines(Engine(layout))
    config = WeightsConfig(bucket_mib=0.004, verify="off")
    options = {"tensor_parallel": 1, "dtype": DTYPE}
    publisher = CountingPublisher([], engines, config, deltas=True, **options)
    publisher.use(senders, engines)
    publisher.publish(1)

    deltas = []
    real = publish.combine
    monkeypatch.setattr(publish, "combine", lambda *args: deltas.append(real(*args)) or deltas[-1])
    for own in params:
        for name, param in own.items():
            # every slice changes; norms change completely, and are sent as they are
            step = 40 if param.dim() == 2 else 1 if "norm" in name else 4
            param.view(-1)[::step] += 0.5
    publisher.reset()
    report = publisher.publish(2)
    (delta,), schedule = deltas, publisher._schedule
    sizes = delta.sizes
    assert not report.in_full and report.num_bytes == sum(sizes)
    hosts = Hosts(["here"] * 4, ["here"])
    counted = count_refit(schedule, hosts, is_shared=False, sizes=sizes)
    compare(counted, publisher, report)

    without_deltas = CountingPublisher([], engines, config, **options)
    without_deltas.use(senders, engines)
    without_deltas.publish(3)
    without_deltas.reset()
    report = without_deltas.publish(4)
    counted = count_refit(without_deltas._schedule, hosts, is_shared=False)
    compare(counted, without_deltas, report)
    assert report.num_rounds > 4
    ranks = [without_deltas.copied["rank", rank] for rank in range(4)]
    assert without_deltas.copied["engine", 0] == sum(ranks) == report.num_bytes
    # the count has the gaps between slices
    assert 0 <= counted.filled - max(ranks) < ALIGNMENT * counted.fills
    assert 0 <= counted.read - report.num_bytes < ALIGNMENT * counted.reads


def compare(counted, publisher, report):
    operations = (
        max(publisher.count["rank", rank] for rank in range(4)),
        publisher.count["engine", 0],
    )
    assert counted.num_rounds == report.num_rounds
    assert (counted.calls, counted.trips) == (publisher.calls, publisher.trips)
    assert (counted.fills, counted.reads) == operations
