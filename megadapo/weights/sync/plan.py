"""The plan of a weight update: which trainer rank copies which slice to which engine rank.

Made once, by `planning.py`. All decoder layers share one template of copies, so that a plan stays
small: it is handed to every rank as it is, and every rank reads its own part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megadapo.weights.layout.cuts import round_up
from megadapo.weights.layout.shards import EnginePosition
from megadapo.weights.sync.transports.parcels import Seat

ALIGNMENT = 16
"""Bytes that every slice in a bucket is aligned to."""
LAYER = "{layer}"


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """How the engines are cut, and how many of them receive on their own."""

    tp_size: int = 1
    pp_size: int = 1
    expert_parallel: bool = False
    nodes: tuple[str, ...] = ("",)
    """Node of each receiver. Engines on one machine that get the same bytes count once."""
    copies: tuple[int, ...] = ()
    """How many engines each receiver is, where one hands on to the next; none given: one each."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine; tensor parallelism is the fastest axis."""
        return self.tp_size * self.pp_size

    def num_engines(self, receivers: int | None = None) -> int:
        """How many engines the first so many receivers are; None: all of them."""
        return sum((self.copies or (1,) * len(self.nodes))[:receivers])

    def position(self, rank: int) -> EnginePosition:
        """What of the model an engine rank holds."""
        return EnginePosition(
            tp_rank=rank % self.tp_size,
            tp_size=self.tp_size,
            pp_rank=rank // self.tp_size,
            pp_size=self.pp_size,
            expert_parallel=self.expert_parallel,
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """One slice of a trainer parameter and where it goes in an engine parameter."""

    source_name: str
    source_offset: int
    target_name: str
    target_offset: int
    axis: int
    size: int
    width: int | None
    expert: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.width is None:
            return (self.size,)
        return (self.size, self.width) if self.axis == 0 else (self.width, self.size)

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return self.size * (1 if self.width is None else self.width)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Copies of one block that the same sources can send and the same engine rank receives."""

    owners: tuple[int, ...]
    """Which coordinates of the trainer hold all of it, by their order in the block's stage."""
    tp_rank: int
    """Tensor-parallel rank of the receiving engine rank."""
    copies: tuple[Copy, ...]
    num_bytes: int
    """Bytes in a bucket, alignment included."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the model: embedding, one decoder layer, final norm or head."""

    template: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One bundle of one block on its way from a trainer rank to an engine rank."""

    origin: int
    """Trainer rank whose parameters are copied."""
    feeder: int
    """Trainer rank in whose bucket the receiver finds them; the origin where they can meet."""
    engine: int
    engine_rank: int
    block: int
    bundle: int
    passer: int
    """Trainer rank that hands it to the feeder, where that is another than the origin: the origin
    itself, or the feeder of another engine on the node, which has it in its bucket too."""

    @property
    def is_forwarded(self) -> bool:
        """Whether the feeder gets it from a rank that got it from the origin."""
        return self.passer != self.origin


@dataclass(frozen=True)
class Plan:
    """Every copy of a weight update."""

    num_sources: int
    engine: EngineShape
    itemsize: int
    templates: list[list[Bundle]]
    blocks: list[Block]
    transfers: list[Transfer]

    def bundle(self, transfer: Transfer) -> Bundle:
        """The copies of a transfer, with layer numbers still open."""
        return self.templates[self.blocks[transfer.block].template][transfer.bundle]

    def copies(self, transfer: Transfer) -> Iterator[Copy]:
        """The copies of a transfer, with the names of its layer."""
        layer = self.blocks[transfer.block].layer
        for copy in self.bundle(transfer).copies:
            if layer is None:
                yield copy
            else:
                source = copy.source_name.replace(LAYER, str(layer))
                target = copy.target_name.replace(LAYER, str(layer))
                yield replace(copy, source_name=source, target_name=target)

    def slices(self, transfer: Transfer, offset: int = 0) -> Iterator[tuple[int, Copy]]:
        """The copies of a transfer with their places in its bucket."""
        for copy in self.copies(transfer):
            yield offset, copy
            offset += round_up(copy.numel * self.itemsize, ALIGNMENT)

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer and of all engines together."""
        return self.num_sources + self.engine.num_engines() * self.engine.num_ranks

    def engine_rank_number(self, engine: int, engine_rank: int, copy: int = 0) -> int:
        """Number of an engine rank among all ranks, the trainer's counted first.

        `copy`: which of the receiver's engines; trainer ranks send to the first.
        """
        first = self.engine.num_engines(engine)
        return self.num_sources + (first + copy) * self.engine.num_ranks + engine_rank

    def seat(self, engine: int, engine_rank: int, copy: int = 0) -> Seat:
        """The place of an engine rank among all ranks."""

        def number(other: int) -> int:
            return self.engine_rank_number(engine, engine_rank, other)

        return Seat(
            rank=number(copy),
            num_ranks=self.num_ranks,
            giver=number(copy - 1) if copy else None,
            taker=number(copy + 1) if copy + 1 < self.num_copies(engine) else None,
        )

    def num_copies(self, engine: int) -> int:
        """How many engines a receiver is, of which one hands on to the next."""
        return self.engine.copies[engine] if self.engine.copies else 1

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts that `plan_from_json` reads."""
        return {
            "num_sources": self.num_sources,
            "engine": asdict(self.engine),
            "itemsize": self.itemsize,
            "templates": [[_bundle_row(bundle) for bundle in one] for one in self.templates],
            "blocks": [[block.template, block.layer] for block in self.blocks],
            "transfers": [_fields(transfer) for transfer in self.transfers],
        }


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The plan that `Plan.to_json` wrote."""
    lists = {name: tuple(data["engine"][name]) for name in ("nodes", "copies")}
    return Plan(
        num_sources=data["num_sources"],
        engine=EngineShape(**data["engine"] | lists),
        itemsize=data["itemsize"],
        templates=[[_read_bundle(row) for row in one] for one in data["templates"]],
        blocks=[Block(*row) for row in data["blocks"]],
        transfers=[Transfer(*row) for row in data["transfers"]],
    )


def plan_bytes(plan: Plan) -> int:
    """Bytes of all slices of a plan, without alignment."""
    per_bundle = [
        [sum(copy.numel for copy in bundle.copies) for bundle in template]
        for template in plan.templates
    ]
    return plan.itemsize * sum(
        per_bundle[plan.blocks[transfer.block].template][transfer.bundle]
        for transfer in plan.transfers
    )


def _fields(record: Copy | Transfer) -> list[Any]:
    return [getattr(record, name) for name in record.__slots__]


def _bundle_row(bundle: Bundle) -> list[Any]:
    copies = [_fields(copy) for copy in bundle.copies]
    return [list(bundle.owners), bundle.tp_rank, copies, bundle.num_bytes]


def _read_bundle(row: list[Any]) -> Bundle:
    owners, tp_rank, copies, num_bytes = row
    return Bundle(tuple(owners), tp_rank, tuple(Copy(*copy) for copy in copies), num_bytes)
