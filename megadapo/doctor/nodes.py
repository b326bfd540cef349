"""What every node of a running Ray cluster has: asked on the node itself, one process on each."""

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
from megadapo.cluster.nodes import ANSWER_TIMEOUT_S, answer_to, is_answered, question_file
from megadapo.cluster.ray_connection import admits_strangers, join_cluster
from megadapo.cluster.this_node import ClockOffset, ClockReading, clock_offset, read_clock
from megadapo.observe.machine import GIB, Machine, inspect_machine

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PROBE_BYTES = 32 << 20
"""What one node sends to another, to see how fast that is."""
FIRST_BYTES = 1 << 20
"""What it sends before, as connections are opened by the first send."""
MAX_ROUNDS = 16
"""Rounds of such sends: in each, every node sends to another one."""
ANSWER = "doctor"
"""What an answer's file is called after."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a node says of itself."""

    machine: Machine
    megadapo: str
    """Version and a digest of the sources that are imported there."""
    free_disk_gib: float
    """For Ray's temporary files, or in the run's folder where it is given."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster as the others and it itself see it."""

    name: str
    num_gpus: int
    """That Ray hands out."""
    facts: NodeFacts | None
    failure: str = ""
    """Why there are no facts."""
    sees_folder: bool | None = None
    """Whether it and this process see each other's files in the folder; None: no folder given."""
    clock: ClockOffset | None = None
    """Against this process's."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast one node's bytes came to another, through Ray's object store."""

    source: str
    target: str
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All nodes, the head first, and the links between those that answered."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    admits_strangers: bool = False
    """Whether Ray asks those who join for no token."""


def inspect_cluster(address: str, folder: Path | None) -> ClusterFacts:
    """Join a cluster, ask every node, and leave it again.

    Args:
        address: of Ray's head as HOST:PORT; "auto" on a node of the cluster.
        folder: the run's, made where it is missing.

    Raises:
        InfraError: there is no cluster, or it refuses this process.
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
            admits_strangers=admits_strangers(),
        )
    finally:
        ray.shutdown()


class NodeInspector:
    """The actor on a node; takes nothing of what the cluster hands out."""

    def facts(self, folder: Path | None) -> NodeFacts:
        return NodeFacts(
            machine=inspect_machine(),
            megadapo=f"{megadapo.__version__} ({_digest_of_sources()})",
            free_disk_gib=shutil.disk_usage(_there(folder or Path("/tmp"))).free / GIB,
        )

    def clock(self) -> ClockReading:
        return read_clock()

    def answer(self, question: Path) -> bool:
        """Whether the question is seen here; then an answer lies beside it."""
        return answer_to(question, ANSWER)

    def offer(self) -> list[Any]:
        """A little and PROBE_BYTES for another node, in a list so that Ray leaves them here."""
        import numpy as np
        import ray

        return [ray.put(np.ones(size, dtype=np.uint8)) for size in (FIRST_BYTES, PROBE_BYTES)]

    def fetch(self, offer: list[Any]) -> float:
        """Seconds for PROBE_BYTES, over a connection that the little has opened."""
        import ray

        first, probe = offer
        ray.get(first, timeout=ANSWER_TIMEOUT_S)
        started = time.perf_counter()
        ray.get(probe, timeout=ANSWER_TIMEOUT_S)
        return time.perf_counter() - started


def _there(folder: Path) -> Path:
    """The folder, or what of its path there is on a node that does not see it."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _digest_of_sources() -> str:
    package = Path(megadapo.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".c")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


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
        yield Node(
            name=name,
            num_gpus=num_gpus,
            facts=facts,
            sees_folder=None if folder is None else _share_folder(inspector, folder),
            clock=clock_offset(partial(_clock_of, inspector)),
        )


def _answer(call: Any) -> tuple[Any, str]:
    """What a node answered, or why it did not."""
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


def _share_folder(inspector: ActorHandle[Any], folder: Path) -> bool:
    """Ask by a file, and look for the answer's."""
    with question_file(folder) as question:
        is_seen, _ = _answer(inspector.answer.remote(question))
        return bool(is_seen) and is_answered(question, ANSWER)


def _measure_links(inspectors: Sequence[tuple[str, ActorHandle[Any]]]) -> Iterator[Link]:
    """In round k every node sends to the k-th after it, all of them at once."""
    count = len(inspectors)
    for distance in range(1, min(count, MAX_ROUNDS + 1)):
        pairs = [(inspectors[i], inspectors[(i + distance) % count]) for i in range(count)]
        offers = [_answer(source.offer.remote())[0] for (_, source), _ in pairs]
        calls: list[Any] = [
            target.fetch.remote(offer)
            for (_, (_, target)), offer in zip(pairs, offers, strict=True)
        ]
        for ((source_name, _), (target_name, _)), call in zip(pairs, calls, strict=True):
            seconds, _ = _answer(call)
            rate = PROBE_BYTES / seconds * 1e-9 if seconds else 0.0
            yield Link(source=source_name, target=target_name, gb_per_s=rate)
