"""Make the plan of a weight update from the trainer's and the engines' layouts.

An engine rank receives exactly the spans of its own shards. If several trainer ranks hold a slice
(data-parallel replicas, replicated norms), the one with the least to send sends it.

The topology says which engines read from which trainer ranks, and over which transport.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megadapo.errors import WeightError
from megadapo.weights.layout.cuts import Span, round_up
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import EnginePosition, Shard, ShardPosition
from megadapo.weights.sync.plan import (
    ALIGNMENT,
    LAYER,
    Block,
    Bundle,
    Copy,
    EngineShape,
    Transfer,
    UpdatePlan,
)

if TYPE_CHECKING:
    from megadapo.weights.sync.transports.interface import Transport


Coordinate = tuple[tuple[int, int, int | None], tuple[int, int, int, int]]
"""Tensor- and expert-parallel position of a trainer rank within its stage."""
Device = tuple[str, str | None]
"""Node, and the GPU's name on it; None on a CPU."""


@dataclass(frozen=True)
class Hosts:
    """The nodes of trainer ranks and receivers."""

    sources: Sequence[str]
    receivers: Sequence[str]

    def crosses_nodes(self, transfer: Transfer) -> bool:
        """Return whether a transfer crosses nodes, to its sender or to its receiver."""
        return self.sources[transfer.relay] != self.receivers[transfer.receiver]


@dataclass(frozen=True)
class _Owned:
    """A span of a trainer shard, and the coordinates that hold it."""

    span: Span
    name: str
    offset: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class _PlannedBlock:
    """A block with its possible owners and its receivers."""

    kind: str
    layer: int | None
    stage: tuple[tuple[int, ...], ...]
    """Ranks of each coordinate, in the order of `Bundle.owners`."""
    pp_ranks: tuple[int, ...]
    """Engine stages that receive it."""


def make_plan(
    layout: ModelLayout,
    sources: Sequence[ShardPosition],
    engine: EngineShape,
    *,
    itemsize: int,
    max_bundle_bytes: int,
    source_nodes: Sequence[str] | None = None,
    hosts: Hosts | None = None,
) -> UpdatePlan:
    """Plan the update of every engine from a trainer.

    Args:
        sources: Position of every trainer rank, by rank.
        itemsize: Bytes per element of the engine's type.
        max_bundle_bytes: Largest bundle; at most the size of a bucket.
        source_nodes: Member of `engine.nodes` that each trainer rank shares memory with; None:
            every rank reaches every engine.
        hosts: Node of every trainer rank and receiver. Each node gets every byte from other nodes
            once. None: `source_nodes` and `engine.nodes`.
    """
    planned = _blocks(layout, sources, engine)
    templates: list[list[Bundle]] = []
    numbers: dict[object, int] = {}
    blocks = []
    for block in planned:
        coordinates = tuple(_coordinate(sources[ranks[0]]) for ranks in block.stage)
        key = (block.kind, coordinates)
        if key not in numbers:
            numbers[key] = len(templates)
            firsts = [sources[ranks[0]] for ranks in block.stage]
            copies = _template_copies(layout, block.kind, firsts, engine)
            templates.append(_bundles(copies, itemsize, max_bundle_bytes))
        blocks.append(Block(numbers[key], block.layer))
    assigner = _Assigner(len(sources), engine, source_nodes, hosts)
    transfers = assigner.assign(planned, [templates[block.template] for block in blocks])
    return UpdatePlan(len(sources), engine, itemsize, templates, blocks, transfers)


def _blocks(
    layout: ModelLayout, sources: Sequence[ShardPosition], engine: EngineShape
) -> list[_PlannedBlock]:
    """List the blocks of the model in order, with their holders and receiving stages."""
    holders: dict[str | int, dict[Coordinate, list[int]]] = {}
    for rank, position in enumerate(sources):
        parts: list[str | int] = list(position.layer_indices)
        parts += ["embedding"] if position.has_embedding else []
        parts += ["final_norm", "head"] if position.has_head else []
        for part in parts:
            ranks = holders.setdefault(part, {})
            ranks.setdefault(_coordinate(position), []).append(rank)

    def block(part: str | int, *pp_ranks: int) -> _PlannedBlock:
        stage = tuple(tuple(ranks) for ranks in holders[part].values())
        if isinstance(part, str):
            return _PlannedBlock(part, None, stage, pp_ranks)
        return _PlannedBlock("layer", part, stage, pp_ranks)

    last = engine.pp_size - 1
    tied = layout.shape.tied
    blocks = [block("embedding", *(sorted({0, last}) if tied else [0]))]
    for pp_rank in range(engine.pp_size):
        at = EnginePosition(pp_rank=pp_rank, pp_size=engine.pp_size)
        blocks += [block(layer, pp_rank) for layer in layout.engine_layers(at)]
    blocks.append(block("final_norm", last))
    return blocks if tied else [*blocks, block("head", last)]


def _coordinate(position: ShardPosition) -> Coordinate:
    rank, size = position.expert_tp
    return (
        (position.tp_rank, position.tp_size, position.padded_vocab_size),
        (position.ep_rank, position.ep_size, rank, size),
    )


def _template_copies(
    layout: ModelLayout, kind: str, positions: list[ShardPosition], engine: EngineShape
) -> Iterator[tuple[int, tuple[int, ...], Copy]]:
    """Yield engine tensor-parallel rank, owners and copy for every parameter of a block."""
    row = None if kind == "layer" else getattr(layout.family, kind)
    owned: dict[str, dict[tuple[int, int], _Owned]] = defaultdict(dict)
    for number, position in enumerate(positions):
        for shard in (
            layout.megatron_layer(position, LAYER)
            if row is None
            else [layout.megatron_shard(row, position)]
        ):
            for offset, span in shard.placed_spans():
                known = owned[span.tensor].get((span.start, span.stop))
                owners = (number,) if known is None else (*known.owners, number)
                one = _Owned(span, shard.name, offset, owners)
                owned[span.tensor][span.start, span.stop] = one
    for tp_rank in range(engine.tp_size):
        at = engine.position(tp_rank)
        for shard in (
            layout.engine_layer(at, LAYER) if row is None else [layout.engine_shard(row, at)]
        ):
            for offset, span in shard.placed_spans():
                for one, copy in _intersect(shard, offset, span, owned[span.tensor].values()):
                    yield tp_rank, one.owners, copy


def _intersect(
    shard: Shard, offset: int, span: Span, owned: Iterable[_Owned]
) -> Iterator[tuple[_Owned, Copy]]:
    """Yield the copies that fill one span of an engine's shard."""
    for one in owned:
        low, high = max(span.start, one.span.start), min(span.stop, one.span.stop)
        if low < high:
            yield (
                one,
                Copy(
                    source_name=one.name,
                    source_offset=one.offset + low - one.span.start,
                    target_name=shard.name,
                    target_offset=offset + low - span.start,
                    axis=shard.axis,
                    size=high - low,
                    width=shard.width,
                    expert=shard.expert,
                ),
            )


def _bundles(
    copies: Iterator[tuple[int, tuple[int, ...], Copy]], itemsize: int, max_bytes: int
) -> list[Bundle]:
    """Group copies with the same owners and receiver, in bundles of at most `max_bytes`."""
    open_bundles: dict[tuple[int, tuple[int, ...]], tuple[list[Copy], int]] = {}
    bundles = []
    for tp_rank, owners, whole in copies:
        for copy in _divide(whole, itemsize, max_bytes):
            size = round_up(copy.numel * itemsize, ALIGNMENT)
            members, total = open_bundles.get((tp_rank, owners), ([], 0))
            if members and total + size > max_bytes:
                bundles.append(Bundle(owners, tp_rank, tuple(members), total))
                members, total = [], 0
            open_bundles[tp_rank, owners] = ([*members, copy], total + size)
    for (tp_rank, owners), (members, total) in open_bundles.items():
        bundles.append(Bundle(owners, tp_rank, tuple(members), total))
    return bundles


def _divide(copy: Copy, itemsize: int, max_bytes: int) -> Iterator[Copy]:
    """Divide a copy into pieces of at most `max_bytes`."""
    per_row = itemsize * (1 if copy.width is None else copy.width)
    step = max_bytes // per_row if copy.axis == 0 else max_bytes // round_up(per_row, ALIGNMENT)
    if step < 1:
        raise WeightError(
            f"weights.bucket_mib is too small: one row of {copy.source_name} has {per_row} bytes."
        )
    for start in range(0, copy.size, step):
        yield copy._replace(
            source_offset=copy.source_offset + start,
            target_offset=copy.target_offset + start,
            size=min(step, copy.size - start),
        )


class _Assigner:
    """Chooses owners, relays and senders so that all trainer ranks send about the same amount."""

    def __init__(
        self,
        num_sources: int,
        engine: EngineShape,
        source_nodes: Sequence[str] | None,
        hosts: Hosts | None,
    ) -> None:
        self._engine = engine
        self._nodes = source_nodes
        self._hosts = hosts or Hosts(source_nodes or [""] * num_sources, engine.nodes)
        self._sent = [0] * num_sources
        self._share = 0.0
        """Bytes that each rank sends if all send the same."""
        self._sender_of: dict[tuple[int, int], int] = {}
        """(block, bundle) -> the last rank that sends it."""
        self._came = [0] * num_sources
        """Bytes that each rank gets from other nodes."""
        self._heaps: dict[object, list[tuple[int, int]]] = {}
        self._present: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        """(node, block, bundle) -> the first receiver there that got it from another node, its
        owner, and its sender."""

    def assign(self, planned: list[_PlannedBlock], templates: list[list[Bundle]]) -> list[Transfer]:
        """Make one transfer per bundle, block, receiver and stage; assign the largest first."""
        wanted = [
            (bundle.num_bytes, number, receiver, pp_rank, index)
            for number, (block, bundles) in enumerate(zip(planned, templates, strict=True))
            for receiver in range(len(self._engine.nodes))
            for pp_rank in block.pp_ranks
            for index, bundle in enumerate(bundles)
        ]
        self._share = sum(one[0] for one in wanted) / len(self._sent)
        # engines of a node take turns as the first, which gets a bundle from another node
        most = max(Counter(self._hosts.receivers).values())
        wanted.sort(key=lambda one: (-one[0], one[1], one[4], (one[2] + one[1] + one[4]) % most))
        transfers = []
        for num_bytes, number, receiver, pp_rank, index in wanted:
            bundle = templates[number][index]
            engine_rank = pp_rank * self._engine.tp_size + bundle.tp_rank
            stage, owners = planned[number].stage, bundle.owners
            owner, relay, sender = self._choose(stage, owners, receiver, num_bytes, number, index)
            transfers.append(Transfer(owner, sender, receiver, engine_rank, number, index, relay))
        transfers.sort(key=lambda one: (one.block, one.receiver, one.engine_rank, one.bundle))
        return transfers

    def _choose(
        self,
        stage: tuple[tuple[int, ...], ...],
        owners: tuple[int, ...],
        receiver: int,
        size: int,
        block: int,
        bundle: int,
    ) -> tuple[int, int, int]:
        """Choose owner, relay and sender of a bundle.

        The sender is an owner unless no owner shares memory with the receiver. Bytes cross nodes
        only if no rank of the receiver's node has them.
        """

        def candidates() -> list[int]:
            return [rank for owner in owners for rank in stage[owner]]

        nodes, host = self._nodes, self._hosts.receivers[receiver]

        def nearest() -> list[int]:
            on_host = [rank for rank in candidates() if self._hosts.sources[rank] == host]
            return on_host or candidates()

        if nodes is None:
            near, same = nearest(), self._sender_of.get((block, bundle))
            if same in near and self._sent[same] + size <= self._share:
                # one rank compares a bundle with what it sent last, for all receivers
                rank = same
                self._sent[rank] += size
            else:
                rank = self._least_loaded((stage, owners, "nearest", host), nearest, size)
                self._sender_of[block, bundle] = rank
            return rank, rank, rank
        place = self._engine.nodes[receiver]
        near = [rank for rank in candidates() if nodes[rank] == place]
        if near:
            rank = self._least_loaded((stage, owners, place), lambda: near, size)
            return rank, rank, rank
        senders = [rank for rank, at in enumerate(nodes) if at == place]
        on_host = [rank for rank in candidates() if self._hosts.sources[rank] == host]
        present, loads = self._present.get((host, block, bundle)), self._sent
        if on_host:
            owner = relay = self._least_loaded((stage, owners, "on", host), lambda: on_host, size)
        elif present is not None and present[0] != receiver:
            _, owner, relay = present
            self._sent[relay] += size
        else:
            owner = relay = self._least_loaded((stage, owners), candidates, size)
            # the cards of all ranks share what comes from other nodes
            loads = self._came
        sender = self._least_loaded((loads is self._came, place), lambda: senders, size, loads)
        if loads is self._came:
            self._sent[sender] += size
            self._present.setdefault((host, block, bundle), (receiver, owner, sender))
        return owner, relay, sender

    def _least_loaded(
        self,
        key: object,
        candidates: Callable[[], list[int]],
        size: int,
        loads: list[int] | None = None,
    ) -> int:
        """Return the candidate with the fewest bytes to send so far, and add `size` to it."""
        loads = self._sent if loads is None else loads
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = [(loads[rank], rank) for rank in candidates()]
            heapq.heapify(heap)
        # Ranks are in several heaps, so an entry may be out of date; loads only grow.
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        loads[rank] += size
        return rank


@dataclass(frozen=True)
class Topology:
    """The receivers, and the memory that they share with trainer ranks."""

    transport: Transport
    receiver_of: list[int]
    """Number of each engine's receiver."""
    receivers: list[str]
    """Name of the memory that each receiver reads."""
    sources: list[str] | None
    """Name of the memory that each trainer rank writes; None if it reaches every receiver."""
    hosts: Hosts

    @property
    def engines_per_receiver(self) -> tuple[int, ...]:
        """Number of engines of each receiver, if one forwards messages to the next."""
        is_chained = self.transport in ("nccl", "gloo")
        receivers = range(len(self.receivers)) if is_chained else ()
        return tuple(self.receiver_of.count(receiver) for receiver in receivers)

    @property
    def member_of_each(self) -> list[int]:
        """Number of each engine among the engines of its receiver."""
        return [self.receiver_of[:index].count(one) for index, one in enumerate(self.receiver_of)]


def find_topology(
    ranks: Sequence[Device],
    engine_nodes: Sequence[str],
    engine_gpus: Sequence[Sequence[str]],
) -> Topology:
    """Decide which engines read from which trainer ranks, and over which transport.

    Args:
        ranks: Node and GPU of every trainer rank.
        engine_gpus: GPUs of every engine; empty on a CPU.
    """
    devices: list[set[Device]] = [
        {(node, gpu) for gpu in gpus} for node, gpus in zip(engine_nodes, engine_gpus, strict=True)
    ]
    transport = _choose_transport(ranks, devices, engine_nodes)
    nodes = [node for node, _ in ranks]
    if transport != "cuda_ipc":
        # Engines on one node read the same memory, or forward messages to each other: every byte is
        # written once, or sent there once, for all of them.
        receivers = list(dict.fromkeys(engine_nodes))
        receiver_of = [receivers.index(node) for node in engine_nodes]
        sources = None if transport == "nccl" else nodes
        return Topology(transport, receiver_of, receivers, sources, Hosts(nodes, receivers))
    receiver_of = list(range(len(devices)))
    receivers = [f"engine {number}" for number in receiver_of]
    # A process can open memory only on its own engine's GPUs.
    sources = [
        next((name for name, own in zip(receivers, devices, strict=True) if rank in own), "")
        for rank in ranks
    ]
    return Topology(transport, receiver_of, receivers, sources, Hosts(nodes, engine_nodes))


def topology_beside_training(num_ranks: int, num_engines: int) -> Topology:
    """Return a topology that takes nothing from the trainer's devices and process groups.

    Messages go from main memory straight to the engines, since ranks that train cannot relay any.
    """
    here = ["here"]
    hosts = Hosts(here * num_ranks, here)
    return Topology("gloo", [0] * num_engines, here, None, hosts)


def _choose_transport(
    ranks: Sequence[Device], engines: Sequence[set[Device]], engine_nodes: Sequence[str]
) -> Transport:
    """Return a transport that engines read in place, or NCCL if some engine cannot.

    CUDA IPC needs a trainer rank on the engine's GPUs, shared memory one on its node.
    """
    if ranks[0][1] is None:
        nodes = {node for node, _ in ranks}
        return "shared_memory" if nodes.issuperset(engine_nodes) else "nccl"
    return "cuda_ipc" if all(own.intersection(ranks) for own in engines) else "nccl"
