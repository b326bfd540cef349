"""`megadapo doctor --cluster`: the checks of a Ray cluster's nodes against each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megadapo.doctor.doctor import Diagnosis, diagnose, report
from megadapo.doctor.nodes import (
    MAX_ROUNDS,
    PROBE_BYTES,
    ClusterFacts,
    Node,
    NodeFacts,
    inspect_cluster,
)
from megadapo.observe.tables import TextTable

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
