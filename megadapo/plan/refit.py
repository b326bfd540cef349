"""The work of one weight update, counted from the schedule that runs, and its seconds on GPUs.

A test compares bytes, operations and calls with those of real updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megadapo.config import RunConfig
from megadapo.plan.cards import MIB, Card
from megadapo.trainer.model.model_layout import rank_positions
from megadapo.weights.layout.cuts import round_up
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.sync.plan import ALIGNMENT, EngineShape, UpdatePlan
from megadapo.weights.sync.planning import Hosts, Topology, find_topology, make_plan

if TYPE_CHECKING:
    from megadapo.weights.sync.buckets import Schedule

LINK_SHARE = 0.70
"""Share of a link's bandwidth that a weight update reaches."""
COPY_SHARE = 0.80
"""Share of a card's memory bandwidth that a copy reaches."""
DELTA_SHARE = 0.05
"""Bytes of a delta over those of a full update; benchmarks/README.md measures 1 to 9 %."""
COMPARING, ENCODING, DECODING, CHANGING = 4, 36, 24, (8, 14)
"""Tensor operations of a delta: three numbers per bundle, and one per slice by its axis."""
CALL_S = 4e-4
"""The driver's time for one call of a process by Ray, measured on two busy cores."""
TRIP_S = 1e-3
"""Latency of calls, through vLLM to an engine's ranks."""
LAUNCH_S = 1e-5
"""Time of one tensor operation from Python."""
TURN_S = 2e-4
"""Time of a round in which both sides synchronise their GPU and pass on the turn."""
PACK_S = 1e-5
"""Time of packing one transfer of a delta; ranks and engines do so in turn."""
HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and pinned main memory, by PCIe 5."""


@dataclass(frozen=True, kw_only=True)
class Refit:
    """The work of an update, by the busiest rank, GPU or network card."""

    num_rounds: int
    num_transfers: int
    calls: int
    """Calls of a single process by the driver."""
    trips: int
    """Times that the driver waits for calls."""
    filled: int
    """Bytes that a trainer rank copies out of its weights."""
    fills: int
    """Operations on them."""
    compared: int
    """Bytes that a trainer rank gets from main memory, to find what changed, and puts back."""
    sent: int
    """Bytes that a GPU's network card sends."""
    received: int
    linked: int
    """Bytes that a GPU sends to others of its node."""
    read: int
    """Bytes that an engine rank copies into its weights."""
    reads: int

    def seconds(self, card: Card) -> dict[str, float]:
        """Return the seconds of each part. Some overlap, so their sum is a bound."""
        copying = COPY_SHARE * card.memory_bandwidth / 2
        network, links = LINK_SHARE * card.network_bandwidth, LINK_SHARE * card.link_bandwidth
        return {
            "calls": self.calls * CALL_S + self.trips * TRIP_S,
            "rounds": self.num_rounds * TURN_S,
            "comparing": 2 * self.compared / HOST_BANDWIDTH,
            "packing": 2 * PACK_S * self.num_transfers if self.compared else 0.0,
            "filling": max(self.fills * LAUNCH_S, self.filled / copying),
            "network": max(self.sent, self.received) / network,
            "links": self.linked / links,
            "reading": max(self.reads * LAUNCH_S, self.read / copying),
        }


def count_refit(
    schedule: Schedule, hosts: Hosts, *, is_shared: bool, sizes: Sequence[int] | None = None
) -> Refit:
    """Count the work of an update that compares no checksums.

    Args:
        schedule: The schedule of full updates.
        hosts: Nodes of trainer ranks and receivers.
        is_shared: Whether the engines' ranks, in order, are on the GPUs of the trainer's.
        sizes: Bytes of every transfer, if only the changes are sent.
    """
    from megadapo.rollout.pool.publish import ROUNDS_PER_CALL
    from megadapo.weights.sync.delta import bundle_number

    plan, work = schedule.plan, {name: Counter[int]() for name in _COUNTED}
    is_delta = sizes is not None
    schedule = schedule if sizes is None else schedule.repack(sizes)

    def move(start: int, to: int, size: int, *, crosses: bool) -> None:
        if is_shared:
            start, to = start % plan.num_sources, to % plan.num_sources
        if crosses:
            work["sent"][start] += size
            work["received"][to] += size
        elif start != to:
            work["linked"][start] += size

    encoded: set[tuple[int, int]] = set()
    for _, placed in schedule:
        one, size = placed.transfer, placed.num_bytes
        bundle = plan.bundle(one)
        if is_delta and (key := (one.owner, bundle_number(one))) not in encoded:
            encoded.add(key)
            work["compared"][one.owner] += bundle.num_bytes
            work["filled"][one.owner] += bundle.num_bytes
            work["fills"][one.owner] += len(bundle.copies) + COMPARING
            work["fills"][one.owner] += ENCODING if size < bundle.num_bytes else 0
        if not one.is_forwarded:
            work["filled"][one.owner] += size
            work["fills"][one.owner] += 1 if is_delta else len(bundle.copies)
        node = hosts.sources[one.sender]
        move(one.relay, one.sender, size, crosses=hosts.sources[one.relay] != node)
        move(one.sender, placed.target, size, crosses=hosts.receivers[one.receiver] != node)
        operations = len(bundle.copies)
        if size < bundle.num_bytes:
            operations = DECODING + sum(CHANGING[copy.axis] for copy in bundle.copies)
        for member in range(plan.num_members(one.receiver)):
            rank = plan.engine_rank_number(one.receiver, one.engine_rank, member)
            work["read"][rank] += size
            work["reads"][rank] += operations
            if member:
                move(rank - plan.engine.num_ranks, rank, size, crosses=False)
    # a bucket before the pause, then in each span one call of both sides; the last may fill none
    spans = -(-schedule.num_rounds // ROUNDS_PER_CALL)
    rank_calls = 1 + -(-(schedule.num_rounds - 1) // ROUNDS_PER_CALL) + 2 * is_delta
    engine_calls = 2 + spans + is_delta
    return Refit(
        num_rounds=schedule.num_rounds,
        num_transfers=len(plan.transfers),
        calls=rank_calls * plan.num_sources + engine_calls * plan.engine.num_engines(),
        trips=rank_calls + engine_calls,
        **{name: max(counts.values(), default=0) for name, counts in work.items()},
    )


_COUNTED = ("filled", "fills", "compared", "sent", "received", "linked", "read", "reads")


def plan_for(
    config: RunConfig, layout: ModelLayout, *, gpus_per_node: int
) -> tuple[UpdatePlan, Hosts]:
    """Return the plan of a run's updates, and the nodes of ranks and receivers."""
    from megadapo.weights.sync.buckets import max_bundle_bytes

    trainer, rollout = config.trainer, config.rollout
    positions = rank_positions(layout, trainer)
    topology = _topology(config, len(positions), gpus_per_node)
    plan = make_plan(
        layout,
        positions,
        EngineShape(
            tp_size=rollout.tensor_parallel,
            pp_size=rollout.pipeline_parallel,
            expert_parallel=rollout.expert_parallel,
            nodes=tuple(topology.receivers),
            engines_per_receiver=topology.engines_per_receiver,
        ),
        itemsize=4 if config.model.dtype == "float32" else 2,
        max_bundle_bytes=max_bundle_bytes(int(config.weights.bucket_mib * MIB)),
        source_nodes=topology.sources,
        hosts=topology.hosts,
    )
    return plan, topology.hosts


def _topology(config: RunConfig, num_ranks: int, gpus_per_node: int) -> Topology:
    has_gpus = config.cluster.device != "cpu"

    def device(gpu: int) -> tuple[str, str | None]:
        return f"node {gpu // gpus_per_node}", str(gpu % gpus_per_node) if has_gpus else None

    first = 0 if config.cluster.placement == "colocated" else num_ranks
    engines = [
        [device(first + engine * config.rollout.ranks_per_engine + rank)
         for rank in range(config.rollout.ranks_per_engine)]
        for engine in range(config.rollout.num_engines)
    ]  # fmt: skip
    return find_topology(
        [device(rank) for rank in range(num_ranks)],
        [gpus[0][0] for gpus in engines],
        [[gpu for _, gpu in gpus if gpu is not None] for gpus in engines],
    )


def refit_of(config: RunConfig, plan: UpdatePlan, hosts: Hosts, *, delta: bool = False) -> Refit:
    """Count the work of one update of a run."""
    from megadapo.weights.sync.buckets import pack

    schedule = pack(plan, int(config.weights.bucket_mib * MIB))
    is_shared = config.cluster.placement == "colocated"
    sizes = None
    if delta:
        # all bundles change alike
        full = (plan.bundle(one).num_bytes for one in plan.transfers)
        sizes = [round_up(int(DELTA_SHARE * size), ALIGNMENT) for size in full]
    return count_refit(schedule, hosts, is_shared=is_shared, sizes=sizes)
