"""`megadapo doctor --cluster`: the checks of a Ray cluster's nodes against each other."""

from __future__ import annotations

import hashlib
import shutil
import statistics
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
from megadapo.doctor.doctor import Diagnosis, diagnose, report
from megadapo.observe.tables import TextTable

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


_MAX_CLOCK_OFFSET_S = 0.1
_MIN_FREE_GIB = 20.0
_SLOW_LINK = 0.5
"""Share of the median link's speed below which a link is slow."""
_MIN_GB_PER_S = 0.2
"""Lowest acceptable speed; a network of 1 Gb/s reaches about half of it."""


@dataclass(frozen=True, kw_only=True)
class ClusterDiagnosis(Diagnosis):
    """Facts and problems of a cluster."""

    facts: ClusterFacts


def diagnose_cluster(facts: ClusterFacts) -> ClusterDiagnosis:
    """Check each node, and the nodes against each other."""
    return ClusterDiagnosis(
        facts=facts, errors=tuple(_errors(facts)), warnings=tuple(_warnings(facts))
    )


def doctor_cluster(address: str, folder: Path | None, *, as_json: bool = False) -> int:
    """Check a cluster, print the diagnosis and return the exit code."""
    diagnosis = diagnose_cluster(inspect_cluster(address, folder))
    table = _table(diagnosis.facts, folder)
    return report(diagnosis, table, as_json=as_json, healthy="the nodes fit together")


def _known(facts: ClusterFacts) -> list[tuple[Node, NodeFacts]]:
    return [(node, node.facts) for node in facts.nodes if node.facts is not None]


def _errors(facts: ClusterFacts) -> Iterator[str]:
    for node in facts.nodes:
        if node.facts is None:
            yield f"node {node.name}: {node.failure} (is the same megadapo installed there?)"
    known = _known(facts)
    for node, found in known:
        yield from (f"node {node.name}: {text}" for text in diagnose(found.machine).errors)
        num_there = len(found.machine.gpus)
        if found.machine.uses_cuda and node.num_gpus != num_there:
            yield (
                f"node {node.name}: Ray offers {node.num_gpus} of {num_there} GPUs: restart Ray "
                f"there, with --num-gpus={num_there} if needed"
            )
        if node.sees_folder is False:
            yield (
                f"node {node.name}: this process and the node do not see each other's files in "
                "--folder: use storage that all nodes see, for checkpoints and logs"
            )
    if known:
        yield from _version_differences(known)


def _version_differences(known: list[tuple[Node, NodeFacts]]) -> Iterator[str]:
    """Compare versions with those of the first node that answered."""
    first, expected = known[0][0], _versions(known[0][1])
    for node, found in known[1:]:
        for name, version in _versions(found).items():
            if version != expected[name]:
                yield (
                    f"node {node.name}: {name} {version}, but {expected[name]} on node "
                    f"{first.name}: use the same image or environment on both"
                )


def _versions(facts: NodeFacts) -> dict[str, str]:
    packages = {name: version or "none" for name, version in facts.machine.packages.items()}
    return {"megadapo": facts.megadapo, "Python": facts.machine.python, **packages}


def _warnings(facts: ClusterFacts) -> Iterator[str]:
    if facts.accepts_without_token:
        yield (
            "anyone who reaches this Ray cluster can run code on its nodes, so a run joins it only "
            "with cluster.allow_unauthenticated = true: start Ray with RAY_AUTH_MODE=token"
        )
    known = _known(facts)
    for node, found in known:
        if found.free_disk_gib < _MIN_FREE_GIB:
            yield f"node {node.name}: {found.free_disk_gib:.1f} GiB of disk are free"
        if node.clock is not None and abs(node.clock.ahead_ns) - node.clock.error_ns > (
            _MAX_CLOCK_OFFSET_S * 1e9
        ):
            yield (
                f"node {node.name}: its clock is {node.clock.ahead_ns * 1e-9:+.2f} s off this "
                "machine's: set both by NTP"
            )
    for what, values in (
        ("GPUs", {_gpus(found) for _, found in known}),
        ("drivers", {found.machine.driver or "none" for _, found in known}),
    ):
        if len(values) > 1:
            yield f"the nodes have different {what}: {'; '.join(sorted(values))}"
    yield from _slow_links(facts)


def _slow_links(facts: ClusterFacts) -> Iterator[str]:
    if not facts.links:
        return
    median = statistics.median(link.gb_per_s for link in facts.links)
    for link in facts.links:
        if link.gb_per_s < max(_MIN_GB_PER_S, _SLOW_LINK * median):
            yield (
                f"node {link.source} to node {link.target}: {link.gb_per_s:.2f} GB/s, {median:.2f} "
                "in the median: check its network card and the network of Ray's address"
            )


def _gpus(facts: NodeFacts) -> str:
    names = sorted({gpu.name for gpu in facts.machine.gpus})
    return f"{len(facts.machine.gpus)} x {', '.join(names)}" if names else "none"


def _table(facts: ClusterFacts, folder: Path | None) -> str:
    notes = []
    for _, found in _known(facts)[:1]:
        notes.append(", ".join(f"{name} {version}" for name, version in _versions(found).items()))
    if facts.links:
        notes.append(
            f"sends: {PROBE_BYTES >> 20} MiB each through Ray's object store, every node to "
            f"another in each of at most {MAX_ROUNDS} rounds; this measures the network of Ray and "
            "Gloo, not InfiniBand"
        )
    if folder is None:
        notes.append("shared folder: not checked; name the run's with --folder")
    head = ("node", "GPUs", "driver", "cores, memory", "free disk", "folder", "clock")
    return TextTable(
        title=f"{len(facts.nodes)} nodes",
        note="\n".join(notes),
        head=(*head, "slowest send"),
        rows=[_row(node, facts) for node in facts.nodes],
    ).text()


def _row(node: Node, facts: ClusterFacts) -> list[str]:
    if node.facts is None:
        return [node.name, "no answer", *[""] * 6]
    machine = node.facts.machine
    rates = [link.gb_per_s for link in facts.links if link.source == node.name]
    return [
        node.name,
        _gpus(node.facts),
        machine.driver or "none",
        f"{machine.num_cores}, {machine.memory_gib:.0f} GiB",
        f"{node.facts.free_disk_gib:.0f} GiB",
        {None: "-", True: "seen", False: "not seen"}[node.sees_folder],
        "-" if node.clock is None else f"{node.clock.ahead_ns * 1e-6:+.1f} ms",
        f"{min(rates):.2f} GB/s" if rates else "-",
    ]
