"""`megadapo doctor --cluster`: whether the nodes of a Ray cluster fit together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megadapo.doctor.doctor import diagnose
from megadapo.doctor.nodes import (
    MAX_ROUNDS,
    PROBE_BYTES,
    ClusterFacts,
    Node,
    NodeFacts,
    inspect_cluster,
)

_MAX_CLOCK_S = 0.1
_MIN_FREE_GIB = 20.0
_SLOW_LINK = 0.5
"""Of the median link's speed."""
_MIN_GB_PER_S = 0.2
"""A network of 1 Gb/s brings half of that."""


@dataclass(frozen=True, kw_only=True)
class ClusterDiagnosis:
    """What `megadapo doctor --cluster` found."""

    facts: ClusterFacts
    errors: tuple[str, ...]
    """What keeps a run from starting, or from being right."""
    warnings: tuple[str, ...]
    """What makes it slower or riskier."""


def judge(facts: ClusterFacts) -> ClusterDiagnosis:
    """What is to be mended, node by node."""
    return ClusterDiagnosis(
        facts=facts, errors=tuple(_errors(facts)), warnings=tuple(_warnings(facts))
    )


def doctor_cluster(
    address: str, folder: Path | None, *, as_json: bool = False, console: Console | None = None
) -> int:
    """Print the diagnosis and return the exit code: 1 where something must be mended.

    Raises:
        InfraError: there is no cluster.
    """
    diagnosis = judge(inspect_cluster(address, folder))
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        _print(diagnosis, console or Console(), folder)
    return 1 if diagnosis.errors else 0


def _known(facts: ClusterFacts) -> list[tuple[Node, NodeFacts]]:
    return [(node, node.facts) for node in facts.nodes if node.facts is not None]


def _errors(facts: ClusterFacts) -> Iterator[str]:
    for node in facts.nodes:
        if node.facts is None:
            yield f"node {node.name}: {node.failure} (is megadapo installed there as it is here?)"
    known = _known(facts)
    for node, found in known:
        yield from (f"node {node.name}: {text}" for text in diagnose(found.machine).errors)
        num_there = len(found.machine.gpus)
        if found.machine.uses_cuda and node.num_gpus != num_there:
            yield (
                f"node {node.name}: Ray hands out {node.num_gpus} GPUs of {num_there}: start Ray "
                f"there anew, with --num-gpus={num_there} if need be"
            )
        if node.sees_folder is False:
            yield (
                f"node {node.name}: it and this process do not see each other's files in the "
                "folder: checkpoints and logs must be on storage that all nodes see"
            )
    if known:
        yield from _other_versions(known)


def _other_versions(known: list[tuple[Node, NodeFacts]]) -> Iterator[str]:
    """Held against the first node that answered, the head if it did."""
    first, expected = known[0][0], _versions(known[0][1])
    for node, found in known[1:]:
        for name, version in _versions(found).items():
            if version != expected[name]:
                yield (
                    f"node {node.name}: {name} {version}, but {expected[name]} on node "
                    f"{first.name}: use the same image, or environment, on both"
                )


def _versions(facts: NodeFacts) -> dict[str, str]:
    packages = {name: version or "none" for name, version in facts.machine.packages.items()}
    return {"megadapo": facts.megadapo, "Python": facts.machine.python, **packages}


def _warnings(facts: ClusterFacts) -> Iterator[str]:
    if facts.admits_strangers:
        yield (
            "whoever reaches this Ray cluster runs code on its nodes, so no run joins it without "
            "cluster.allow_unauthenticated = true: start Ray with RAY_AUTH_MODE=token"
        )
    known = _known(facts)
    for node, found in known:
        if found.free_disk_gib < _MIN_FREE_GIB:
            yield f"node {node.name}: {found.free_disk_gib:.1f} GiB of disk are free"
        if node.clock is not None and abs(node.clock.ahead_ns) - node.clock.error_ns > (
            _MAX_CLOCK_S * 1e9
        ):
            yield (
                f"node {node.name}: its clock is {node.clock.ahead_ns * 1e-9:+.2f} s off this "
                "one's: let NTP set both"
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
                "in the median: look at its network card, and at which network Ray's address is of"
            )


def _gpus(facts: NodeFacts) -> str:
    names = sorted({gpu.name for gpu in facts.machine.gpus})
    return f"{len(facts.machine.gpus)} x {', '.join(names)}" if names else "none"


def _print(diagnosis: ClusterDiagnosis, console: Console, folder: Path | None) -> None:
    facts = diagnosis.facts
    table = Table(title=f"{len(facts.nodes)} nodes")
    for heading in ("node", "GPUs", "driver", "cores, memory", "free disk", "folder", "clock"):
        table.add_column(heading)
    table.add_column("slowest send")
    for node in facts.nodes:
        table.add_row(*_row(node, facts))
    console.print(table)
    for _, found in _known(facts)[:1]:
        versions = (f"{name} {version}" for name, version in _versions(found).items())
        console.print(", ".join(versions), highlight=False)
    if facts.links:
        console.print(
            f"sends: {PROBE_BYTES >> 20} MiB each through Ray's object store, in rounds (at most "
            f"{MAX_ROUNDS}) in which every node sends to another; this is the network of Ray and "
            "Gloo, not InfiniBand"
        )
    if folder is None:
        console.print("shared folder: not looked at; name the run's with --folder")
    for text in diagnosis.errors:
        console.print(f"[bold red]error[/bold red]    {text}", highlight=False)
    for text in diagnosis.warnings:
        console.print(f"[bold yellow]warning[/bold yellow]  {text}", highlight=False)
    if not diagnosis.errors and not diagnosis.warnings:
        console.print("[green]the nodes fit together[/green]")


def _row(node: Node, facts: ClusterFacts) -> list[str]:
    if node.facts is None:
        return [node.name, "no answer"]
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
