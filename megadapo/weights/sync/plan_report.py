"""What a weight update of a run would move, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.sync.plan import Plan, Transfer
    from megadapo.weights.sync.planning import Hosts


def report(
    plan: Plan, layout: ModelLayout, hosts: Hosts, *, bucket_bytes: int, num_links: int
) -> list[str]:
    """Bytes per rank and link, buckets and rounds of a plan, as lines of text."""
    from megadapo.weights.sync.buckets import (
        largest_buckets,
        largest_waves,
        num_rounds,
        pack,
    )

    sent: Counter[int] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    links: Counter[tuple[int, tuple[int, int]]] = Counter()
    between = in_node = 0
    for transfer in plan.transfers:
        size = plan.bundle(transfer).num_bytes
        target = (transfer.engine, transfer.engine_rank)
        sent[transfer.feeder] += size
        received[target] += size
        links[transfer.feeder, target] += size
        if crosses_nodes(transfer, hosts):
            between += size
        elif transfer.feeder != transfer.origin:
            in_node += size
        in_node += size * (plan.num_copies(transfer.engine) - 1)
    schedule = pack(plan, bucket_bytes)
    bucket = max(largest_buckets(plan, schedule))
    wave = max(largest_waves(schedule).values())
    moved = sum(sent.values())
    shape, nodes = plan.engine, len(plan.engine.nodes)
    lines = [
        f"{layout.family.architecture}, {layout.shape.num_layers} layers: "
        f"{plan.num_sources} trainer ranks to {nodes} receiver(s) of TP {shape.tp_size}"
        + (f" x PP {shape.pp_size}" if shape.pp_size > 1 else "")
        + (" with expert parallelism" if shape.expert_parallel else ""),
        f"transfers             {len(plan.transfers)} in {num_rounds(schedule)} rounds",
        f"bytes moved           {_size(moved)}, {_size(between)} of them between nodes",
        f"handed on in a node   {_size(in_node)}",
        _spread("trainer rank sends", [sent[rank] for rank in range(plan.num_sources)]),
        _spread("engine rank receives", list(received.values())),
        f"memory, trainer rank  {_size(2 * bucket)} at most: two buckets of {_size(bucket)}, what "
        "is on its way to another node included",
        f"memory, engine rank   {_size(wave)} at most, where buckets are not read in place",
        f"largest of {len(links)} links (trainer rank -> receiver, engine rank):",
    ]
    for (source, (engine, rank)), size in links.most_common(num_links):
        lines.append(f"  {source:>4} -> {engine}, {rank}   {_size(size)}")
    return lines


def crosses_nodes(transfer: Transfer, hosts: Hosts) -> bool:
    """Whether a transfer comes from another node, to its feeder or to its receiver."""
    return hosts.sources[transfer.passer] != hosts.receivers[transfer.engine]


def _spread(what: str, sizes: Sequence[int]) -> str:
    mean = sum(sizes) / len(sizes)
    return (
        f"{what:<22}{_size(mean)} on average, {_size(min(sizes))} to {_size(max(sizes))} "
        f"({max(sizes) / mean:.3f} x)"
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")
