"""The doctor names nodes that differ, are cut off or do not answer."""

from dataclasses import replace

import pytest

from megadapo.cli import run_command
from megadapo.cluster.this_node import ClockOffset
from megadapo.doctor.cluster import diagnose_cluster
from megadapo.doctor.nodes import ClusterFacts, Link, Node, NodeFacts, NodeInspector
from megadapo.errors import ConfigError
from megadapo.observe.machine import PACKAGES, Gpu, Machine

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=79.6, compute_capability=(9, 0))
MACHINE = Machine(
    system="Linux",
    python="3.12.3",
    num_cores=96,
    memory_gib=1000.0,
    shm_gib=500.0,
    gpus=(H100,) * 8,
    driver="580.1",
    c_compiler="gcc",
    packages=dict.fromkeys(PACKAGES, "99.0"),
    torch_cuda="13.0",
    nvidia_apex=True,
)
FACTS = NodeFacts(machine=MACHINE, megadapo="0.1.0 (abc)", free_disk_gib=500.0)
SOUND = Node(
    name="0 (10.0.0.1)",
    num_gpus=8,
    facts=FACTS,
    sees_folder=True,
    clock=ClockOffset(ahead_ns=0, error_ns=0),
)
OTHER = replace(SOUND, name="1 (10.0.0.2)")
OTHER_SOURCES = replace(FACTS, megadapo="0.1.0 (abd)")


def with_machine(**changes) -> Node:
    machine = replace(MACHINE, **changes)
    return replace(OTHER, facts=replace(FACTS, machine=machine))


def cluster(*nodes: Node, links: tuple[Link, ...] = ()) -> ClusterFacts:
    return ClusterFacts(nodes=nodes, links=links)


def test_equal_nodes_have_no_problems():
    links = tuple(Link(source=a, target=b, gb_per_s=2.0) for a, b in ("01", "10"))
    diagnosis = diagnose_cluster(cluster(SOUND, OTHER, links=links))
    assert diagnosis.errors == diagnosis.warnings == ()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (replace(OTHER, facts=None, failure="No module named 'megadapo'"), "No module"),
        (with_machine(python="3.11.7"), "Python 3.11.7, but 3.12.3 on node 0 (10.0.0.1)"),
        (with_machine(packages=MACHINE.packages | {"torch": "2.12"}), "torch 2.12, but 99.0"),
        (with_machine(packages=MACHINE.packages | {"vllm": None}), "vllm is not installed"),
        (replace(OTHER, facts=OTHER_SOURCES), "megadapo 0.1.0 (abd), but 0.1.0 (abc)"),
        (replace(OTHER, num_gpus=0), "Ray hands out 0 GPUs of 8"),
        (replace(OTHER, sees_folder=False), "storage that all nodes see"),
    ],
    ids=["dead", "python", "package", "missing", "sources", "gpus", "folder"],
)
def test_errors_name_their_node(node, words):
    errors = diagnose_cluster(cluster(SOUND, node)).errors
    assert [text for text in errors if words in text and text.startswith("node 1 (10.0.0.2): ")]


def test_slow_or_risky_nodes_are_warnings():
    late = ClockOffset(ahead_ns=3_000_000_000, error_ns=1_000_000)
    unsure = ClockOffset(ahead_ns=150_000_000, error_ns=100_000_000)
    one_gpu = replace(MACHINE, gpus=(H100,), driver="570.9")
    full = replace(FACTS, machine=one_gpu, free_disk_gib=3.0)
    third = replace(OTHER, name="2", num_gpus=1, clock=unsure, facts=full)
    nodes = (SOUND, replace(OTHER, clock=late), third)
    links = [Link(source=a, target=b, gb_per_s=2.0) for a, b in ("01", "12", "20", "10", "21")]
    links.append(Link(source="0", target="2", gb_per_s=0.5))
    diagnosis = diagnose_cluster(cluster(*nodes, links=tuple(links)))
    assert diagnosis.errors == ()
    said = "\n".join(diagnosis.warnings)
    assert "clock is +3.00 s off" in said and said.count("clock") == 1
    assert "node 2: 3.0 GiB of disk are free" in said
    assert "different GPUs: 1 x NVIDIA H100" in said and "570.9" in said
    assert "node 0 to node 2: 0.50 GB/s" in said and said.count("GB/s") == 1


def test_node_without_the_folder_reports_its_disk(tmp_path):
    assert NodeInspector().facts(tmp_path / "not" / "there").free_disk_gib > 0


def test_folder_option_needs_cluster():
    with pytest.raises(ConfigError, match="--folder needs --cluster"):
        run_command(["doctor", "--folder=here"])
