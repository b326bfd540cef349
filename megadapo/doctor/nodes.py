"""Facts about every node of a running Ray cluster, collected by one actor on each node."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megadapo
from megadapo.cluster.machine import GIB, Machine, inspect_machine
from megadapo.cluster.nodes import ANSWER_TIMEOUT_S, reply_if_visible, sees_reply, visibility_file
from megadapo.cluster.ray_connection import accepts_without_token, join_cluster
from megadapo.cluster.this_node import ClockOffset, ClockReading, clock_offset, read_clock

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PROBE_BYTES = 32 << 20
"""Size of the message that measures a link."""
WARM_UP_BYTES = 1 << 20
"""Size of the message before it, which opens the connection."""
MAX_ROUNDS = 16
"""Most rounds of messages; in each round every node sends to another."""
ANSWER = "doctor"
"""Suffix of a reply's file."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Facts that a node reports about itself."""

    machine: Machine
    megadapo: str
    """Version, and a digest of the sources imported there."""
    free_disk_gib: float
    """Free space in the run's folder, or for Ray's temporary files if no folder is given."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster."""

    name: str
    num_gpus: int
    """Number of GPUs that Ray offers to actors and tasks."""
    facts: NodeFacts | None
    failure: str = ""
    """Reason why there are no facts."""
    sees_folder: bool | None = None
    """Whether node and driver see each other's files in the folder; None if none is given."""
    clock: ClockOffset | None = None
    """Offset from this process's clock."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed from one node to another through Ray's object store."""

    source: str
    target: str
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All nodes, the head first, and the links between the nodes that answered."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    accepts_without_token: bool = False
    """Whether anyone may join without a token."""


def inspect_cluster(address: str, folder: Path | None) -> ClusterFacts:
    """Join a cluster, collect the facts of every node, and leave.

    Args:
        address: HOST:PORT of Ray's head, or "auto" on a node of the cluster.
        folder: the run's folder, created if it is missing.
    """
    import ray

    join_cluster(address)
    try:
        alive = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]),
        )
        inspectors = [_start_inspector(node["NodeID"]) for node in alive]
        nodes = list(_ask_nodes(alive, inspectors, folder))
        answering = [
            (node.name, inspector)
            for node, inspector in zip(nodes, inspectors, strict=True)
            if node.facts is not None
        ]
        return ClusterFacts(
            nodes=tuple(nodes),
            links=tuple(_measure_links(answering)),
            accepts_without_token=accepts_without_token(),
        )
    finally:
        ray.shutdown()


class NodeInspector:
    """The actor on a node; it takes no slot of the cluster."""

    def facts(self, folder: Path | None) -> NodeFacts:
        wanted = folder or Path("/tmp")
        # a folder that does not exist yet will be on the disk of its nearest parent
        existing = next(path for path in (wanted, *wanted.parents) if path.exists())
        package = Path(megadapo.__file__).parent
        digest = hashlib.sha256()
        for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".c")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
        return NodeFacts(
            machine=inspect_machine(),
            megadapo=f"{megadapo.__version__} ({digest.hexdigest()[:12]})",
            free_disk_gib=shutil.disk_usage(existing).free / GIB,
        )

    def clock(self) -> ClockReading:
        return read_clock()

    def reply(self, shared_file: Path) -> bool:
        """Return whether this node sees the file; if so, write a reply beside it."""
        return reply_if_visible(shared_file, ANSWER)

    def put_messages(self) -> list[Any]:
        """Put both messages for another node into the object store and return their references."""
        # in a list: Ray would resolve bare references
        import numpy as np
        import ray

        return [ray.put(np.ones(size, dtype=np.uint8)) for size in (WARM_UP_BYTES, PROBE_BYTES)]

    def time_transfer(self, messages: list[Any]) -> float:
        """Return the seconds that the large message takes after the small one."""
        import ray

        first, probe = messages
        ray.get(first, timeout=ANSWER_TIMEOUT_S)
        started = time.perf_counter()
        ray.get(probe, timeout=ANSWER_TIMEOUT_S)
        return time.perf_counter() - started


def _start_inspector(node_id: str) -> ActorHandle[Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(NodeInspector)  # with options, Ray loses its type
    handle: ActorHandle[Any] = actor.options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    ).remote()
    return handle


def _ask_nodes(
    alive: Sequence[dict[str, Any]], inspectors: Sequence[ActorHandle[Any]], folder: Path | None
) -> Iterator[Node]:
    calls: list[Any] = [inspector.facts.remote(folder) for inspector in inspectors]
    for number, (node, inspector, call) in enumerate(zip(alive, inspectors, calls, strict=True)):
        name = f"{number} ({node['NodeManagerAddress']})"
        num_gpus = int(node["Resources"].get("GPU", 0))
        facts, failure = _answer(call)
        if facts is None:
            yield Node(name=name, num_gpus=num_gpus, facts=None, failure=failure)
            continue
        sees_folder = None
        if folder is not None:
            with visibility_file(folder) as shared_file:
                is_seen, _ = _answer(inspector.reply.remote(shared_file))
                sees_folder = bool(is_seen) and sees_reply(shared_file, ANSWER)
        yield Node(
            name=name,
            num_gpus=num_gpus,
            facts=facts,
            sees_folder=sees_folder,
            clock=clock_offset(partial(_clock_of, inspector)),
        )


def _answer(call: Any) -> tuple[Any, str]:
    """Return a node's answer, or None and the reason."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call, timeout=ANSWER_TIMEOUT_S), ""
    except RayError as error:
        lines = str(error).strip().splitlines()
        return None, lines[-1] if lines else type(error).__name__


def _clock_of(inspector: ActorHandle[Any]) -> ClockReading:
    import ray

    call: Any = inspector.clock.remote()
    reading: ClockReading = ray.get(call, timeout=ANSWER_TIMEOUT_S)
    return reading


def _measure_links(inspectors: Sequence[tuple[str, ActorHandle[Any]]]) -> Iterator[Link]:
    """Measure links: in round k every node sends to the k-th node after it, all at once."""
    count = len(inspectors)
    for distance in range(1, min(count, MAX_ROUNDS + 1)):
        pairs = [(inspectors[i], inspectors[(i + distance) % count]) for i in range(count)]
        offers = [_answer(source.put_messages.remote())[0] for (_, source), _ in pairs]
        calls: list[Any] = [
            target.time_transfer.remote(offer)
            for (_, (_, target)), offer in zip(pairs, offers, strict=True)
        ]
        for ((source_name, _), (target_name, _)), call in zip(pairs, calls, strict=True):
            seconds, _ = _answer(call)
            rate = PROBE_BYTES / seconds * 1e-9 if seconds else 0.0
            yield Link(source=source_name, target=target_name, gb_per_s=rate)
