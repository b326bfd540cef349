"""`megadapo doctor --cluster`: the checks of a Ray cluster's nodes against each other."""

from __future__ import annotations

import hashlib
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import megadapo
from megadapo.cluster.machine import GIB, Machine, inspect_machine
from megadapo.cluster.nodes import (
    ANSWER_TIMEOUT_S,
    alive_nodes,
    answers_of,
    ask,
    create_visibility_file,
    is_visible,
    on_node,
    visibility_files,
)
from megadapo.cluster.ray_connection import accepts_without_token, join_cluster
from megadapo.cluster.this_node import ClockOffset, ClockReading, clock_offset, read_clock
from megadapo.doctor.doctor import Diagnosis, diagnose, report
from megadapo.errors import MegadapoError
from megadapo.observe.tables import TextTable

SIZES = (1 << 20, 32 << 20)
"""Bytes of the message that opens a connection, and of the one that measures it."""
MAX_ROUNDS = 16
"""Most rounds of messages; in each round every node sends to another."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The facts about one node of the cluster."""

    name: str
    num_gpus: int
    """Number of GPUs that Ray offers to actors and tasks."""
    machine: Machine
    megadapo: str
    """Version, and a digest of the sources imported there."""
    free_disk_gib: float
    """Free space in the run's folder, or for Ray's temporary files if no folder is given."""
    sees_folder: bool | None = None
    """Whether the node's file in the folder is visible here; None if no folder is given."""
    clock: ClockOffset | None = None
    """Offset from this process's clock."""

    @property
    def versions(self) -> dict[str, str]:
        packages = {name: version or "none" for name, version in self.machine.packages.items()}
        return {"megadapo": self.megadapo, "Python": self.machine.python, **packages}

    @property
    def gpus(self) -> str:
        """Number and products of its GPUs."""
        names = sorted({gpu.name for gpu in self.machine.gpus})
        return f"{len(self.machine.gpus)} x {', '.join(names)}" if names else "none"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed from one node to another through Ray's object store."""

    source: str
    target: str
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All nodes that answer, the head first, and the links between them."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    silent: tuple[str, ...] = ()
    """Name of each other node, and the reason why it does not answer."""
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
            alive_nodes(),
            key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]),
        )
        names = [f"{n} ({node['NodeManagerAddress']})" for n, node in enumerate(alive)]
        options = {name: on_node(node["NodeID"]) for name, node in zip(names, alive, strict=True)}
        num_gpus = [int(node["Resources"].get("GPU", 0)) for node in alive]
        answers = _ask_nodes(options, num_gpus, folder)
        nodes = [one for one in answers.values() if isinstance(one, Node)]
        silent = [f"{name}: {one}" for name, one in answers.items() if not isinstance(one, Node)]
        return ClusterFacts(
            nodes=tuple(nodes),
            links=tuple(_measure_links({node.name: options[node.name] for node in nodes})),
            silent=tuple(silent),
            accepts_without_token=accepts_without_token(),
        )
    finally:
        ray.shutdown()


def _ask_nodes(
    options: Mapping[str, Mapping[str, Any]], num_gpus: Sequence[int], folder: Path | None
) -> dict[str, Node | MegadapoError]:
    with nullcontext() if folder is None else visibility_files(folder) as files:
        calls = {
            name: ask(partial(inspect_node, name, number, folder, files), options[name])
            for name, number in zip(options, num_gpus, strict=True)
        }
        found = answers_of(calls, doing="the report of its facts")
        for name, answer in found.items():
            if isinstance(answer, Node):
                found[name] = replace(
                    answer,
                    sees_folder=None if files is None else is_visible(files, _number(name)),
                    clock=clock_offset(partial(_clock_of, options[name])),
                )
    return found


def _number(name: str) -> str:
    return name.split()[0]


def _clock_of(options: Mapping[str, Any]) -> ClockReading:
    import ray

    reading: ClockReading = ray.get(ask(read_clock, options), timeout=ANSWER_TIMEOUT_S)
    return reading


def inspect_node(name: str, num_gpus: int, folder: Path | None, files: Path | None = None) -> Node:
    """Return the facts about this node, and create its file in the folder."""
    if files is not None:
        create_visibility_file(files, _number(name))
    wanted = folder or Path("/tmp")
    # a folder that does not exist yet will be on the disk of its nearest parent
    existing = next(path for path in (wanted, *wanted.parents) if path.exists())
    package = Path(megadapo.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".c")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return Node(
        name=name,
        num_gpus=num_gpus,
        machine=inspect_machine(),
        megadapo=f"{megadapo.__version__} ({digest.hexdigest()[:12]})",
        free_disk_gib=shutil.disk_usage(existing).free / GIB,
    )


def _measure_links(options: Mapping[str, Mapping[str, Any]]) -> Iterator[Link]:
    """Measure links: in round k every node sends to the k-th node after it, all at once."""
    import numpy as np
    import ray

    names = list(options)
    for distance in range(1, min(len(names), MAX_ROUNDS + 1)):
        targets = dict(zip(names, [*names[distance:], *names[:distance]], strict=True))
        # an answer stays on its node until another one gets it
        messages = {
            name: [ask(partial(np.ones, size, np.uint8), options[name]) for size in SIZES]
            for name in names
        }
        sent = [message for pair in messages.values() for message in pair]
        ray.wait(sent, num_returns=len(sent), timeout=ANSWER_TIMEOUT_S, fetch_local=False)
        calls = {
            name: ask(partial(time_transfer, messages[name]), options[targets[name]])
            for name in names
        }
        for name, seconds in answers_of(calls, doing="the measurement of its network").items():
            rate = 0.0 if isinstance(seconds, MegadapoError) else SIZES[1] / seconds * 1e-9
            yield Link(source=name, target=targets[name], gb_per_s=rate)


def time_transfer(messages: list[Any]) -> float:
    """Return the seconds that the large message takes after the small one."""
    import ray

    first, probe = messages
    ray.get(first, timeout=ANSWER_TIMEOUT_S)
    started = time.perf_counter()
    ray.get(probe, timeout=ANSWER_TIMEOUT_S)
    return time.perf_counter() - started


_MAX_CLOCK_OFFSET_S = 0.1
_MIN_FREE_GIB = 20.0
_SLOW_LINK = 0.5
"""Share of the median link's speed below which a link is slow."""
_MIN_GB_PER_S = 0.2
"""Lowest acceptable speed; a network of 1 Gb/s reaches about half of it."""


def diagnose_cluster(facts: ClusterFacts) -> Diagnosis:
    """Check each node, and the nodes against each other."""
    errors, warnings = list(_errors(facts)), list(_warnings(facts))
    return Diagnosis(errors=errors, warnings=warnings, facts={"facts": facts})


def doctor_cluster(address: str, folder: Path | None, *, as_json: bool) -> int:
    """Check a cluster, print the diagnosis and return the exit code."""
    facts = inspect_cluster(address, folder)
    healthy = "the nodes fit together"
    return report(diagnose_cluster(facts), _table(facts, folder), as_json=as_json, healthy=healthy)


def _errors(facts: ClusterFacts) -> Iterator[str]:
    for text in facts.silent:
        yield f"node {text} (is the same megadapo installed there?)"
    for node in facts.nodes:
        yield from (f"node {node.name}: {text}" for text in _node_errors(node, facts.nodes[0]))


def _node_errors(node: Node, first: Node) -> Iterator[str]:
    """Yield the problems of a node, whose versions must be those of the first one."""
    yield from diagnose(node.machine).errors
    num_there = len(node.machine.gpus)
    if node.machine.uses_cuda and node.num_gpus != num_there:
        yield (
            f"Ray offers {node.num_gpus} of {num_there} GPUs: restart Ray there, with "
            f"--num-gpus={num_there} if needed"
        )
    if node.sees_folder is False:
        yield (
            "this process does not see the node's files in --folder: use storage that all nodes "
            "see, for checkpoints and logs"
        )
    for name, version in node.versions.items():
        if version != first.versions[name]:
            yield (
                f"{name} {version}, but {first.versions[name]} on node {first.name}: use the same "
                "image or environment on both"
            )


def _warnings(facts: ClusterFacts) -> Iterator[str]:
    if facts.accepts_without_token:
        yield (
            "anyone who reaches this Ray cluster can run code on its nodes, so a run joins it only "
            "with cluster.allow_unauthenticated = true: start Ray with RAY_AUTH_MODE=token"
        )
    for node in facts.nodes:
        if node.free_disk_gib < _MIN_FREE_GIB:
            yield f"node {node.name}: {node.free_disk_gib:.1f} GiB of disk are free"
        if node.clock is not None and abs(node.clock.ahead_ns) - node.clock.error_ns > (
            _MAX_CLOCK_OFFSET_S * 1e9
        ):
            yield (
                f"node {node.name}: its clock is {node.clock.ahead_ns * 1e-9:+.2f} s off this "
                "machine's: set both by NTP"
            )
    for what, values in (
        ("GPUs", {node.gpus for node in facts.nodes}),
        ("drivers", {node.machine.driver or "none" for node in facts.nodes}),
    ):
        if len(values) > 1:
            yield f"the nodes have different {what}: {'; '.join(sorted(values))}"
    median = statistics.median([link.gb_per_s for link in facts.links] or [0.0])
    for link in facts.links:
        if link.gb_per_s < max(_MIN_GB_PER_S, _SLOW_LINK * median):
            yield (
                f"node {link.source} to node {link.target}: {link.gb_per_s:.2f} GB/s, {median:.2f} "
                "in the median: check its network card and the network of Ray's address"
            )


def _table(facts: ClusterFacts, folder: Path | None) -> str:
    notes = []
    for node in facts.nodes[:1]:
        notes.append(", ".join(f"{name} {version}" for name, version in node.versions.items()))
    if facts.links:
        notes.append(
            f"sends: {SIZES[1] >> 20} MiB each through Ray's object store, every node to "
            f"another in each of at most {MAX_ROUNDS} rounds; this measures the network of Ray and "
            "Gloo, not InfiniBand"
        )
    if folder is None:
        notes.append("shared folder: not checked; name the run's with --folder")
    head = ("node", "GPUs", "driver", "cores, memory", "free disk", "folder", "clock")
    return TextTable(
        title=f"{len(facts.nodes) + len(facts.silent)} nodes",
        note="\n".join(notes),
        head=(*head, "slowest send"),
        rows=[_row(node, facts) for node in facts.nodes],
    ).text()


def _row(node: Node, facts: ClusterFacts) -> list[str]:
    rates = [link.gb_per_s for link in facts.links if link.source == node.name]
    return [
        node.name,
        node.gpus,
        node.machine.driver or "none",
        f"{node.machine.num_cores}, {node.machine.memory_gib:.0f} GiB",
        f"{node.free_disk_gib:.0f} GiB",
        {None: "-", True: "seen", False: "not seen"}[node.sees_folder],
        "-" if node.clock is None else f"{node.clock.ahead_ns * 1e-6:+.1f} ms",
        f"{min(rates):.2f} GB/s" if rates else "-",
    ]
