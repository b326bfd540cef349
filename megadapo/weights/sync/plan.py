"""The plan of a weight update: which trainer rank copies which slice to which engine rank.

`planning.py` makes it once. All decoder layers share one template of copies, so a plan is small
enough to send whole to every rank, which then reads its own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from megadapo.weights.layout.cuts import round_up
from megadapo.weights.layout.shards import EnginePosition

ALIGNMENT = 16
"""Alignment of every slice in a bucket, in bytes."""
LAYER = "{layer}"


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The parallel sizes of the engines, and the number of receivers.

    A receiver is one engine, or all engines of a node, which share memory or forward what they get.
    """

    tp_size: int = 1
    pp_size: int = 1
    expert_parallel: bool = False
    nodes: tuple[str, ...] = ("",)
    """Node of each receiver."""
    engines_per_receiver: tuple[int, ...] = ()
    """Engines of each receiver, if one forwards to the next; empty: one each."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one engine; tensor parallelism is the fastest axis."""
        return self.tp_size * self.pp_size

    def num_engines(self, receivers: int | None = None) -> int:
        """Count the engines of the first `receivers` receivers, or of all."""
        return sum((self.engines_per_receiver or (1,) * len(self.nodes))[:receivers])

    def position(self, rank: int) -> EnginePosition:
        """Return the position of an engine rank in the model."""
        return EnginePosition(
            tp_rank=rank % self.tp_size,
            tp_size=self.tp_size,
            pp_rank=rank // self.tp_size,
            pp_size=self.pp_size,
            expert_parallel=self.expert_parallel,
        )


class Copy(NamedTuple):
    """One slice of a trainer parameter and its destination in an engine parameter."""

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
        if self.width is None:
            return (self.size,)
        return (self.size, self.width) if self.axis == 0 else (self.width, self.size)

    @property
    def numel(self) -> int:
        return self.size * (1 if self.width is None else self.width)


class Bundle(NamedTuple):
    """Copies of one block that have the same possible owners and the same receiving rank."""

    owners: tuple[int, ...]
    """Trainer coordinates that hold all copies, as indices into the block's stage."""
    tp_rank: int
    """Tensor-parallel rank of the receiving engine rank."""
    copies: tuple[Copy, ...]
    num_bytes: int
    """Bytes in a bucket, alignment included."""


class Block(NamedTuple):
    """A part of the model: embedding, one decoder layer, final norm or head."""

    template: int
    layer: int | None


class Transfer(NamedTuple):
    """One bundle of one block on its way from a trainer rank to an engine rank.

    If the receiver can read the owner's bucket, owner, relay and sender are the same rank.
    Otherwise the relay passes the bundle to the sender's bucket.
    """

    owner: int
    """Trainer rank whose parameters are copied."""
    sender: int
    """Trainer rank whose bucket the receiver reads."""
    receiver: int
    """Number of the receiver: an engine, or all engines of a node."""
    engine_rank: int
    block: int
    bundle: int
    relay: int
    """Trainer rank that passes it to the sender: the owner, or the sender of another engine on
    the same node."""

    @property
    def is_forwarded(self) -> bool:
        """Whether the sender gets it from another rank than the owner."""
        return self.relay != self.owner


@dataclass(frozen=True)
class UpdatePlan:
    """Every copy of a weight update."""

    num_sources: int
    engine: EngineShape
    itemsize: int
    templates: list[list[Bundle]]
    blocks: list[Block]
    transfers: list[Transfer]

    def bundle(self, transfer: Transfer) -> Bundle:
        """Return the copies of a transfer, with a placeholder for the layer number."""
        return self.templates[self.blocks[transfer.block].template][transfer.bundle]

    def slices(self, transfer: Transfer, offset: int = 0) -> Iterator[tuple[int, Copy]]:
        """Yield the copies of a transfer, with its layer's names, and their offsets in a bucket."""
        layer = self.blocks[transfer.block].layer
        for copy in self.bundle(transfer).copies:
            source = copy.source_name.replace(LAYER, str(layer))
            target = copy.target_name.replace(LAYER, str(layer))
            yield offset, copy._replace(source_name=source, target_name=target)
            offset += round_up(copy.numel * self.itemsize, ALIGNMENT)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all slices, without alignment."""
        bundles = (self.bundle(transfer) for transfer in self.transfers)
        return self.itemsize * sum(copy.numel for bundle in bundles for copy in bundle.copies)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the trainer and of all engines together."""
        return self.num_sources + self.engine.num_engines() * self.engine.num_ranks

    def engine_rank_number(self, receiver: int, engine_rank: int, member: int = 0) -> int:
        """Return the number of an engine rank among all ranks, the trainer's counted first.

        `member` selects one of the receiver's engines; trainer ranks send to the first.
        """
        first = self.engine.num_engines(receiver)
        return self.num_sources + (first + member) * self.engine.num_ranks + engine_rank

    def num_members(self, receiver: int) -> int:
        """Return the number of engines of a receiver that forward to each other."""
        counts = self.engine.engines_per_receiver
        return counts[receiver] if counts else 1

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and dicts that `plan_from_json` reads."""
        data: dict[str, Any] = _PLAN.dump_python(self, mode="json")
        return data


_PLAN = TypeAdapter(UpdatePlan)


def plan_from_json(data: dict[str, Any]) -> UpdatePlan:
    """Return the plan that `UpdatePlan.to_json` wrote."""
    return _PLAN.validate_python(data)
